"""The gateways the tests share, started when first needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import httpx
import pytest
from gateways import Gateway, serve
from kvc_server.process import reserved_port

POOL_ARGS = ("--max-total-tokens", "16384", "--max-running-requests", "16")


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway and a worker with the embedded model, ready."""
    log = tmp_path_factory.mktemp("gateway") / "log"
    with serve(log, "--max-rate", "64", "--", *POOL_ARGS) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="session")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose worker does not exist."""
    log = tmp_path_factory.mktemp("lonely") / "log"
    with (
        reserved_port() as nobody,
        serve(log, "--worker-url", f"http://127.0.0.1:{nobody}") as running,
    ):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{running.url}/health")
                break
            time.sleep(0.1)
        yield running
