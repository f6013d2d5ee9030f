"""The operating-system side of the worker: its process group, its log, its end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence

_PR_SET_PDEATHSIG = 1
_KEPT_LINES = 400


def free_port() -> int:
    """A loopback TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class WorkerProcess:
    """One SGLang server, from its start to the end of the last process of its group.

    It leads a process group of its own, because SGLang's scheduler is a child of its HTTP
    server. The kernel kills it when this process dies, however this process dies; SGLang's
    children ask the kernel for the same.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, metrics_dir: tempfile.TemporaryDirectory
    ):
        self._process = process
        self._metrics_dir = metrics_dir
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._log = asyncio.create_task(self._pass_log_on())

    @classmethod
    async def start(cls, command: Sequence[str]) -> WorkerProcess:
        """Run `command`; its output goes to our stderr, a ``worker |`` before each line."""
        metrics_dir = tempfile.TemporaryDirectory(prefix="kvc-metrics-", ignore_cleanup_errors=True)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": metrics_dir.name},
        )
        return cls(process, metrics_dir)

    @property
    def running(self) -> bool:
        """True until the HTTP server's process has ended."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Wait for the HTTP server's process; its exit code, negative for a signal."""
        return await self._process.wait()

    async def kill(self) -> None:
        """End every process of the group at once and collect what they left. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._log
        self._metrics_dir.cleanup()

    def last_lines(self, count: int = 12) -> list[str]:
        """The end of the log."""
        return list(self._lines)[-count:]

    async def _pass_log_on(self) -> None:
        assert self._process.stdout is not None
        pending = b""
        while chunk := await self._process.stdout.read(1 << 16):
            *lines, pending = (pending + chunk).split(b"\n")
            self._write(lines)
        if pending:
            self._write([pending])

    def _write(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._lines.append(text)
                sys.stderr.write(f"worker | {text}\n")
        sys.stderr.flush()


def _die_with_parent() -> Callable[[], None] | None:
    """What the child runs before exec, so that no worker outlives a killed gateway (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # died between fork and prctl
            os._exit(1)

    return ask_kernel
