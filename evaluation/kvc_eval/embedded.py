"""Servers of our own on the embedded model, for as long as they are needed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from kvc_server.process import reserved_port, terminate

_READY_WITHIN_S = 300
_STOP_WITHIN_S = 15


class ServerFailed(Exception):
    """A server did not start; the message names its log."""


@dataclasses.dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path


@contextlib.contextmanager
def embedded(folder: Path, count: int, *worker_args: str) -> Iterator[list[str]]:
    """`count` times `sgl-kvc serve` on free ports, all ready, stopped afterwards; their URLs.

    They share the cores evenly. What they print goes to server-N.log in `folder`, `worker_args`
    go to SGLang. Raises ServerFailed.
    """
    threads = max(1, (os.cpu_count() or 1) // count)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(_started(folder / f"server-{number}.log", threads, *worker_args))
            for number in range(1, count + 1)
        ]
        for server in servers:
            _wait_ready(server)
        yield [server.url for server in servers]


@contextlib.contextmanager
def _started(log: Path, threads: int, *worker_args: str) -> Iterator[_Server]:
    env = {"OMP_NUM_THREADS": str(threads)} | os.environ
    with reserved_port() as port, log.open("wb") as output:
        command = [sys.executable, "-m", "kvc_server.cli", "serve", "--port", str(port)]
        command += ["--log-level", "warning", "--", *worker_args]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            yield _Server(process, f"http://127.0.0.1:{port}", log)
        finally:
            terminate(process, _STOP_WITHIN_S)


def _wait_ready(server: _Server) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerFailed(f"the server did not start; its log is {server.log}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/readiness", timeout=30).status_code == 200:
                return
        time.sleep(0.3)
    within = f"within {_READY_WITHIN_S} s"
    raise ServerFailed(f"the server was not ready {within}; its log is {server.log}")
