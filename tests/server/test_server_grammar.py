"""A grammar that the model's vocabulary cannot write ends one request, not the worker."""

from __future__ import annotations

import httpx
import pytest

from tests.gateways import Gateway

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.mark.parametrize("rate", [1, 8])
@pytest.mark.parametrize("temperature", [0, 1])
def test_json_of_a_vocabulary_without_braces(gateway: Gateway, rate: int, temperature: int) -> None:
    """Sampling found every token forbidden, and raised for everybody."""
    worker = gateway.worker().pid
    body = {
        "model": "recall",
        "messages": [{"role": "user", "content": "the code for red falcon is mango . " * 20}],
        "max_tokens": 8,
        "temperature": temperature,
        "kv_compression": {"rate": rate},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    url = f"{gateway.url}/v1/chat/completions"
    answer = httpx.post(url, json=body | {"response_format": wanted}, timeout=180)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert httpx.post(url, json=body, timeout=180).status_code == 200
    assert gateway.worker().pid == worker
