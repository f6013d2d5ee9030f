"""The operating-system side of the worker: its process group, its log, its end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import psutil

_PR_SET_PDEATHSIG = 1
_KEPT_LINES = 400
_ENGINE_PREFIX = "sglang::"  # SGLang names its schedulers and detokenizers so
_LOOK_INTERVAL_S = 0.25


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A loopback TCP port for a server that the caller starts.

    It stays bound here until the context ends, so nobody else is given it while that server
    starts. On Linux the server can bind it all the same: both ask for SO_REUSEADDR, and only one
    of them listens.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if not sys.platform.startswith("linux"):
            holder.close()
        yield port


def terminate(process: subprocess.Popen, within_s: float) -> None:
    """Ask a process to end, and kill it if it has not `within_s` seconds later."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


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
            preexec_fn=die_with_parent(),
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": metrics_dir.name},
        )
        return cls(process, metrics_dir)

    @property
    def running(self) -> bool:
        """True until the HTTP server's process has ended."""
        return self._process.returncode is None

    async def wait(self) -> str:
        """Wait for the HTTP server's process to end; how it ended."""
        return _exit(await self._process.wait())

    async def wait_broken(self) -> str:
        """Wait until a process that serving needs has ended; which one, and how it is known.

        SGLang notices a dead scheduler by itself, but on a busy machine too late for the
        requests that wait for it. Call this when the worker is ready: all its processes run.
        """
        engine = self._engine_processes()
        server = asyncio.create_task(self.wait())
        try:
            while not server.done():
                for name, process in engine.items():
                    if not _alive(process):
                        return f"{name} is gone"
                await asyncio.wait({server}, timeout=_LOOK_INTERVAL_S)
            return server.result()
        finally:
            server.cancel()

    async def kill(self) -> None:
        """End every process of the group at once and collect what they left. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await self._log
        self._metrics_dir.cleanup()

    def last_lines(self) -> list[str]:
        """The end of the log."""
        return list(self._lines)

    def _engine_processes(self) -> dict[str, psutil.Process]:
        """SGLang's own processes below the HTTP server, by name and pid."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.name().startswith(_ENGINE_PREFIX):
                        found[f"{process.name()} (pid {process.pid})"] = process
        return found

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


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def die_with_parent() -> Callable[[], None] | None:
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
