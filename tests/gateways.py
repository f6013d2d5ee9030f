"""Real gateways for the tests: `sgl-kvc serve` in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
from kvc_server import launch

from sgl_kvc.spec import WORKER_KEYS


class Gateway(launch.Server):
    """A running `sgl-kvc serve`."""

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

    def worker_headers(self, kind: str = "api_key") -> dict[str, str]:
        """What SGLang itself asks for: a key, which we may read as we run as the same user."""
        key = self.worker().environ()[WORKER_KEYS[kind]]
        return {"Authorization": f"Bearer {key}"}

    def scheduler(self) -> psutil.Process:
        """SGLang's scheduler, a child of its HTTP server."""
        for child in self.worker().children(recursive=True):
            if "sglang::scheduler" in " ".join([child.name(), *child.cmdline()]):
                return child
        raise AssertionError("no scheduler process")


@contextlib.contextmanager
def serve(log: Path, *arguments: str, **env: str) -> Iterator[Gateway]:
    """Start `sgl-kvc serve` on a free port; afterwards stop it and see that nothing is left.

    `env` is added to its environment. It has to end by itself when it is asked to, and to take
    its worker along.
    """
    with launch.started(launch.gateway(*arguments), log=log, env=env) as server:
        process = server.process
        yield Gateway(**vars(server))
        family = []
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
        process.wait(120)
    _, left = psutil.wait_procs(family, 60)
    assert not left, f"the gateway left {left} behind"
