"""Real gateways for the tests: `sgl-kvc serve` in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
from kvc_server.process import reserved_port

READY_WITHIN_S = 240


@dataclasses.dataclass
class Gateway:
    """A running `sgl-kvc serve`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_ready(self, within: float = READY_WITHIN_S) -> float:
        """Seconds until /readiness said yes."""
        begin = time.monotonic()
        while time.monotonic() < begin + within:
            assert self.process.poll() is None, self.log_end()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/readiness", timeout=30).status_code == 200:
                    return time.monotonic() - begin
            time.sleep(0.3)
        raise AssertionError(f"not ready within {within} s:\n{self.log_end()}")

    def log_end(self) -> str:
        """The last lines of the log, cut to a readable length."""
        return "\n".join(line[:300] for line in self.log.read_text().splitlines()[-30:])

    def worker(self) -> psutil.Process:
        """The process of SGLang's HTTP server."""
        for child in psutil.Process(self.process.pid).children():
            if "sglang.launch_server" in child.cmdline():
                return child
        raise AssertionError("no worker process")

    def worker_url(self) -> str:
        """Where SGLang itself listens."""
        arguments = self.worker().cmdline()
        return f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}"

    def scheduler(self) -> psutil.Process:
        """SGLang's scheduler, a child of its HTTP server."""
        for child in self.worker().children(recursive=True):
            if "sglang::scheduler" in " ".join([child.name(), *child.cmdline()]):
                return child
        raise AssertionError("no scheduler process")


@contextlib.contextmanager
def serve(log: Path, *arguments: str) -> Iterator[Gateway]:
    """Start `sgl-kvc serve` on a free port; afterwards stop it and see that nothing is left."""
    with reserved_port() as port, log.open("wb") as output:
        command = [sys.executable, "-m", "kvc_server.cli", "serve", "--port", str(port), *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield Gateway(f"http://127.0.0.1:{port}", process, log)
        finally:
            family = []
            if process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            _, left = psutil.wait_procs(family, 5)
            assert not left, f"the gateway left {left} behind"
