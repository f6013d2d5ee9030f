"""A server of our own on the embedded model, for as long as it is needed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from kvc_server.process import free_port

_READY_WITHIN_S = 300
_STOP_WITHIN_S = 15


class ServerFailed(Exception):
    """The server did not start; the message names its log."""


@contextlib.contextmanager
def embedded(log: Path, *worker_args: str) -> Iterator[str]:
    """`sgl-kvc serve` on a free port, ready, stopped afterwards; its URL.

    What it prints goes to `log`, `worker_args` go to SGLang. Raises ServerFailed.
    """
    port = free_port()
    command = [sys.executable, "-m", "kvc_server.cli", "serve", "--port", str(port)]
    command += ["--log-level", "warning", "--", *worker_args]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(server, url, log)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ServerFailed(f"the server did not start; its log is {log}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/readiness", timeout=30).status_code == 200:
                return
        time.sleep(0.3)
    raise ServerFailed(f"the server was not ready within {_READY_WITHIN_S} s; its log is {log}")
