"""The worker's processes are killed while requests are in flight. Runs after the others."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.gateways import Gateway

ERROR_WITHIN_S = 5
BODY = {
    "model": "recall",
    "messages": [{"role": "user", "content": "the code for red falcon is mango ."}],
    "max_tokens": 3500,
    "ignore_eos": True,
}


def stream(gateway: Gateway, begun: threading.Event) -> tuple[float, bytes]:
    """When a long stream ended, and the last event it had; `begun` is set at its first bytes."""
    url = f"{gateway.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=BODY | {"stream": True}, timeout=180) as answer:
        assert answer.status_code == 200
        text = b""
        for part in answer.iter_raw():
            text += part
            begun.set()
    return time.monotonic(), [line for line in text.split(b"\n\n") if line][-1]


def wait_for_it(gateway: Gateway) -> tuple[float, httpx.Response]:
    """When a long request without streaming ended, and how."""
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=BODY, timeout=180)
    return time.monotonic(), answer


def error(body: bytes) -> dict[str, Any]:
    content = json.loads(body)["error"]
    assert set(content) == {"message", "type", "param", "code"}
    assert content["type"] == "server_error"
    return content


def restarts(gateway: Gateway) -> float:
    text = httpx.get(f"{gateway.url}/metrics", timeout=120).text
    (line,) = (line for line in text.split("\n") if line.startswith("kvc_worker_restarts_total "))
    return float(line.split()[1])


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
def test_a_killed_worker_is_replaced(gateway: Gateway, victim: str) -> None:
    gateway.wait_ready()
    restarted = restarts(gateway)
    process, family = getattr(gateway, victim)(), gateway.worker().children(recursive=True)
    family.append(gateway.worker())
    with ThreadPoolExecutor() as pool:
        begun = threading.Event()
        waiting = pool.submit(wait_for_it, gateway)
        time.sleep(1)
        streaming = pool.submit(stream, gateway, begun)
        assert begun.wait(180)
        assert not streaming.done()
        assert not waiting.done()
        killed = time.monotonic()
        process.kill()
        ended, last = streaming.result(timeout=120)
        assert ended - killed < ERROR_WITHIN_S
        assert last.startswith(b'data: {"error"')
        assert error(last.removeprefix(b"data: "))["code"] == "worker_lost"
        ended, answer = waiting.result(timeout=120)
        assert ended - killed < ERROR_WITHIN_S
        assert answer.status_code in (502, 503)
        error(answer.content)

    for path in ("/readiness", "/health"):
        ready = httpx.get(gateway.url + path, timeout=60)
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert httpx.get(f"{gateway.url}/live").status_code == 200
    refused = httpx.post(f"{gateway.url}/v1/chat/completions", json=BODY)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    error(refused.content)

    gateway.wait_ready()
    assert not any(old.is_running() for old in family), "the old worker's processes are gone"
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions", json=BODY | {"max_tokens": 4}, timeout=180
    )
    assert answer.status_code == 200
    assert restarts(gateway) > restarted
