"""Servers as processes: what to run, how to start it, wait until it serves, and end it.

Everything that starts a server builds on this: the gateway for its worker (process.py), `demo`
and `eval` for a gateway, and benches and tests for both.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

READY_WITHIN_S = 300.0
_STOP_WITHIN_S = 15.0
_PROBE_INTERVAL_S = 0.3
_STDERR = 2  # its file descriptor
_PR_SET_PDEATHSIG = 1


class LaunchFailed(Exception):
    """A server did not come up; the message says why and quotes the end of its log."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What to run.

    Attributes
    ----------
    python : arguments of the Python interpreter, up to the port.
    arguments : what follows the port.
    ready : path that answers 200 as soon as the server serves.
    stop_s : seconds in which it may end by itself when it is stopped; 0 kills it at once.
    """

    python: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    ready: str = "/health"
    stop_s: float = 0.0

    def command(self, port: int) -> list[str]:
        """The command line that serves on `port`."""
        return [sys.executable, *self.python, "--port", str(port), *self.arguments]


def sglang(model: Path | str, *arguments: str) -> Program:
    """SGLang by itself on a loopback address: one worker. The last of equal `arguments` wins."""
    module = ("-m", "sglang.launch_server")
    return Program((*module, "--model-path", str(model), "--host", "127.0.0.1"), arguments)


def gateway(*arguments: str) -> Program:
    """`sgl-kvc serve`, which starts a worker of its own; what follows ``--`` goes to that."""
    python = ("-m", "kvc_server.cli", "serve")
    return Program(python, arguments, ready="/readiness", stop_s=_STOP_WITHIN_S)


@dataclasses.dataclass(frozen=True)
class Server:
    """A program that was started, in a process group of its own.

    Attributes
    ----------
    url : base URL without a trailing slash.
    log : the file its output goes to.
    """

    program: Program
    url: str
    process: subprocess.Popen[bytes]  # or alike: `started`
    log: Path

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> float:
        """Wait until it serves; seconds that took. Raises LaunchFailed."""
        begin = time.monotonic()
        with self.client(timeout=30) as client:
            while time.monotonic() < begin + within_s:
                if (code := self.process.poll()) is not None:
                    raise self._failed(f"ended ({how_ended(code)}) before it was ready")
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(self.program.ready).status_code == 200:
                        return time.monotonic() - begin
                time.sleep(_PROBE_INTERVAL_S)
        raise self._failed(f"was not ready within {within_s:g} s")

    def log_end(self, lines: int = 30) -> str:
        """The last lines of the log, each cut to a readable length."""
        text = self.log.read_text(errors="replace")
        return "\n".join(line[:300] for line in text.splitlines()[-lines:])

    def stop(self) -> None:
        """End it and what is left of its process group. Idempotent."""
        if self.process.poll() is None and self.program.stop_s:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.program.stop_s)
        kill_group(self.process.pid)
        self.process.wait()

    def client(self, timeout: float = 300) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False)

    def async_client(self, timeout: float = 300) -> httpx.AsyncClient:
        """A client that opens as many connections as it is asked for."""
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits, trust_env=False)

    def _failed(self, what: str) -> LaunchFailed:
        end = self.log_end()
        said = f"; its log is {self.log} and ends with:\n{end}" if end else ""
        return LaunchFailed(f"the server {what}{said}")


@contextlib.contextmanager
def started(
    program: Program,
    *,
    log: Path | None = None,
    verbose: bool = False,
    env: Mapping[str, str] | None = None,
    popen: Callable[..., Any] = subprocess.Popen,
) -> Iterator[Server]:
    """A server on a free loopback port, which may not serve yet; stopped afterwards.

    Parameters
    ----------
    log : file for its output; None takes a temporary one, which stays only after an exception.
    verbose : whether its output goes to our stderr, and not to the log.
    env : added to our environment.
    popen : what makes the process, with the arguments of `subprocess.Popen`.
    """
    file = _temporary_log() if log is None else log
    with reserved_port() as port:
        with file.open("wb") as out:
            process = popen(
                program.command(port),
                stdout=_STDERR if verbose else out,
                stderr=subprocess.STDOUT,
                **child_options(env),
            )
        server = Server(program, f"http://127.0.0.1:{port}", process, file)
        try:
            yield server
        finally:
            server.stop()
    if log is None:
        file.unlink()


@contextlib.contextmanager
def launched(
    program: Program, *, within_s: float = READY_WITHIN_S, **options: Any
) -> Iterator[Server]:
    """`started` with its `options`, and ready. Raises LaunchFailed."""
    with started(program, **options) as server:
        server.wait_ready(within_s)
        yield server


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


def child_options(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Keyword arguments of `Popen`, or asyncio's equal, for a server: nothing to read, a process
    group of its own, an end when we end, and our environment with `env`.
    """
    return {
        "stdin": subprocess.DEVNULL,
        "start_new_session": True,
        "preexec_fn": die_with_parent(),
        "env": os.environ | dict(env or {}),
    }


def die_with_parent() -> Callable[[], None] | None:
    """What a child runs before exec, so that the kernel kills it when we die (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # died between fork and prctl
            os._exit(1)

    return ask_kernel


def kill_group(pid: int) -> None:
    """Kill every process of the group that `pid` leads or led."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def how_ended(code: int) -> str:
    """A process's return code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _temporary_log() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="sgl-kvc-", suffix=".log")
    os.close(descriptor)
    return Path(name)
