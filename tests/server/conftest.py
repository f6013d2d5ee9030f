"""OpenAI's client of the gateway, and a gateway without a worker; made when first needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from kvc_server.launch import reserved_port

from tests.gateways import Gateway, serve


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose worker does not exist."""
    log = tmp_path_factory.mktemp("lonely") / "log"
    with (
        reserved_port() as nobody,
        serve(log, "--worker-url", f"http://127.0.0.1:{nobody}") as running,
    ):
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{running.url}/health")
                break
            time.sleep(0.1)
        yield running
