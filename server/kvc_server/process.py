"""The worker's process as the gateway supervises it: its log, its end, what is left of it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import psutil

from kvc_server.launch import child_options, how_ended, kill_group

_KEPT_LINES = 400
_ENGINE_PREFIX = "sglang::"  # SGLang names its schedulers and detokenizers so
_LOOK_INTERVAL_S = 0.25
_GONE = (None, psutil.STATUS_ZOMBIE)


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
        self._stopped_since: float | None = None
        self._log = asyncio.create_task(self._pass_log_on())

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str]) -> WorkerProcess:
        """Run `command` with `env` added to our environment.

        Its output goes to our stderr, a ``worker |`` before each line.
        """
        metrics_dir = tempfile.TemporaryDirectory(prefix="kvc-metrics-", ignore_cleanup_errors=True)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            **child_options({"PROMETHEUS_MULTIPROC_DIR": metrics_dir.name, **env}),
        )
        return cls(process, metrics_dir)

    @property
    def running(self) -> bool:
        """True until the HTTP server's process has ended."""
        return self._process.returncode is None

    async def wait(self) -> str:
        """Wait for the HTTP server's process to end; how it ended."""
        return how_ended(await self._process.wait())

    @property
    def stopped_s(self) -> float:
        """Seconds for which `wait_broken` has seen one of its processes stopped (SIGSTOP)."""
        return 0.0 if self._stopped_since is None else time.monotonic() - self._stopped_since

    async def wait_broken(self) -> str:
        """Wait until a process that serving needs has ended; which one, and how it is known.

        SGLang notices a dead scheduler by itself, but on a busy machine too late for the
        requests that wait for it. Call this when the worker is ready: all its processes run.
        """
        engine = self._engine_processes()
        itself = psutil.Process(self._process.pid)
        server = asyncio.create_task(self.wait())
        try:
            while not server.done():
                states = {name: _state(process) for name, process in engine.items()}
                for name, state in states.items():
                    if state in _GONE:
                        return f"{name} is gone"
                if psutil.STATUS_STOPPED not in (*states.values(), _state(itself)):
                    self._stopped_since = None
                elif self._stopped_since is None:
                    self._stopped_since = time.monotonic()
                await asyncio.wait({server}, timeout=_LOOK_INTERVAL_S)
            return server.result()
        finally:
            server.cancel()

    def listens_on(self, port: int) -> bool:
        """Whether one of its processes listens on the TCP `port`, and not somebody else's."""
        with contextlib.suppress(psutil.Error):
            itself = psutil.Process(self._process.pid)
            for process in (itself, *itself.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    for connection in process.net_connections("tcp"):
                        ours = connection.laddr and connection.laddr.port == port
                        if ours and connection.status == psutil.CONN_LISTEN:
                            return True
        return False

    async def kill(self) -> None:
        """End every process of the group at once and collect what they left. Idempotent."""
        kill_group(self._process.pid)
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


def _state(process: psutil.Process) -> str | None:
    """psutil's status of a process, None if it is gone."""
    try:
        return process.status() if process.is_running() else None
    except psutil.Error:
        return None
