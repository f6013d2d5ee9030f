"""What the worker or the gateway refuses: the error's shape, and that serving goes on."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.gateways import Gateway
from tests.server.chats import chat

LONG = "river " * 4097


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(LONG)),
        ("/v1/completions", {"model": "recall", "prompt": LONG}),
        ("/generate", {"text": LONG}),
        ("/generate", {"text": [LONG, "hello"]}),
    ],
)
def test_a_prompt_beyond_the_context_is_the_clients_error(
    gateway: Gateway, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = httpx.post(gateway.url + path, json=body | {"stream": stream}, timeout=180)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert "longer than the model's context length (4096 tokens)" in error["message"]
    still_serves(gateway)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", chat(temperature="hot"), "temperature"),
        ("/v1/completions", {"model": "recall", "prompt": "hello", "max_tokens": -1}, "max_tokens"),
        ("/generate", {}, None),
        ("/generate", {"text": "hello", "sampling_params": {"temperature": -1}}, None),
    ],
)
def test_what_the_worker_refuses_has_our_shape(
    gateway: Gateway, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = httpx.post(gateway.url + path, json=body, timeout=180)
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert "site-packages" not in error["message"]
    still_serves(gateway)


@pytest.mark.parametrize(
    "knob", [{"rate": 0.5}, {"rate": 65}, {"rate": 2, "budget": 2}, {"rate": 2, "policy": "?"}]
)
def test_a_refused_knob_leaves_the_server_alive(
    client: openai.OpenAI, gateway: Gateway, knob: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**chat(), extra_body={"kv_compression": knob})
    assert caught.value.param.startswith("kv_compression.")
    still_serves(gateway)


def still_serves(gateway: Gateway) -> None:
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions", json=chat("hello ?", max_tokens=1), timeout=180
    )
    assert answer.status_code == 200
