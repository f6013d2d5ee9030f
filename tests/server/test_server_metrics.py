"""What is counted, and what a client that leaves gives back."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateways import Gateway
from tests.server.chats import chat, events


def gauge(gateway: Gateway, name: str) -> float:
    """The sum of a metric's samples, ours or the worker's."""
    text = httpx.get(f"{gateway.url}/metrics", timeout=120).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


def eventually(condition: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False


def idle(gateway: Gateway) -> bool:
    """Whether the engine has no request, running or waiting: only then it flushes its cache."""
    url, headers = f"{gateway.worker_url()}/flush_cache", gateway.worker_headers("admin_api_key")
    answer = httpx.post(url, headers=headers, timeout=120)
    assert answer.status_code in (200, 400)
    return answer.status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(gateway: Gateway, stream: bool) -> None:
    assert eventually(lambda: idle(gateway), within=60)
    body = chat("hello ?", stream=stream, max_tokens=4000, ignore_eos=True)
    url = f"{gateway.url}/v1/chat/completions"
    command = ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as client:
        try:
            assert eventually(lambda: not idle(gateway), within=60)
            assert client.poll() is None
        finally:
            client.kill()
    assert eventually(lambda: idle(gateway), within=60)
    text = httpx.get(f"{gateway.url}/metrics", timeout=120).text
    assert 'kvc_requests_in_flight{endpoint="/v1/chat/completions"} 0.0' in text


def test_metrics_add_up(gateway: Gateway) -> None:
    before = gauge(gateway, "kvc_kv_bytes_total")
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions",
        json=chat(kv_compression={"rate": 8}, stream=True),
        timeout=180,
    )
    sizes = events(answer.text)[-1]["kv_compression"]["bytes"]
    assert gauge(gateway, "kvc_kv_bytes_total") == before + sizes["before"] + sizes["after"]
    assert gauge(gateway, "kvc_worker_up") == 1
    assert gauge(gateway, "kvc_time_to_first_token_seconds_count") > 0
    assert gauge(gateway, "sglang:prompt_tokens_total") > 0
    short = chat("what is the code for red falcon ?", kv_compression={"rate": 8})
    assert httpx.post(f"{gateway.url}/v1/chat/completions", json=short, timeout=180).is_success
    text = httpx.get(f"{gateway.url}/metrics", timeout=120).text
    assert "kvc_skipped_total{reason=\"the prompt's N tokens are fewer" in text
    assert 'kvc_requests_in_flight{endpoint="/v1/chat/completions"} 0.0' in text
