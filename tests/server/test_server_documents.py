"""``/v1/kv_cache``: documents that are kept compressed, through the gateway to a real worker."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import httpx
import pytest
from kvc_recall.tasks import sample
from kvc_server.documents import _checked, _knob, _refused
from kvc_server.errors import ApiError
from kvc_server.settings import Settings

from tests.gateways import Gateway
from tests.server.chats import chat

KNOB = {"kv_compression": {"rate": 8}}


def document(seed: int, tokens: int = 512) -> str:
    return " ".join(sample("needles8", 512, Random(seed)).text.split()[:tokens])


def keep(gateway: Gateway, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/kv_cache", json=KNOB | body, timeout=60)


def stored(gateway: Gateway, **query: str) -> dict[str, dict[str, Any]]:
    """By id."""
    answer = httpx.get(f"{gateway.url}/v1/kv_cache", params=query).json()
    assert answer["object"] == "list"
    return {each["id"]: each for each in answer["data"]}


def messages(text: str, *more: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}, *more]


def test_a_document_is_kept_read_and_released(gateway: Gateway) -> None:
    text = document(1)
    made = keep(gateway, messages=messages(text), ttl_s=60)
    assert made.status_code == 200, made.text
    kept = made.json()
    assert kept["tokens"] % 16 == 0
    assert 480 <= kept["tokens"] <= 512
    assert kept["blocks"] == -(-kept["tokens"] // 16 // 8)
    assert (kept["pinned"], kept["hits"], kept["readers"]) == (True, 0, 0)
    assert 0 < kept["expires"] - time.time() < 60
    assert stored(gateway)[kept["id"]] == kept
    for question in ("k1", "k2 k3"):
        body = chat() | {
            "messages": messages(text, {"role": "user", "content": question}),
            "kv_compression": {"rate": 8, "question": "last_message"},
        }
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["kv_compression"]["skipped"] is None
    assert stored(gateway)[kept["id"]]["hits"] == 2
    again = keep(gateway, messages=messages(text), ttl_s=600).json()
    assert again["id"] == kept["id"]
    assert again["expires"] > kept["expires"] + 500
    url = f"{gateway.url}/v1/kv_cache/{kept['id']}"
    assert httpx.delete(url, params={"cache_salt": "another"}).status_code == 404
    assert httpx.delete(url).json() == {"id": kept["id"], "released": True}
    assert stored(gateway)[kept["id"]]["pinned"] is False
    assert httpx.delete(url).status_code == 409
    assert httpx.delete(f"{gateway.url}/v1/kv_cache/none").status_code == 404


def test_a_document_is_released_when_its_time_is_over(gateway: Gateway) -> None:
    name = keep(gateway, text=document(2), ttl_s=1).json()["id"]
    assert stored(gateway)[name]["pinned"] is True
    deadline = time.monotonic() + 10
    while stored(gateway)[name]["pinned"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert stored(gateway)[name]["pinned"] is False


def test_a_tenant_sees_its_own(gateway: Gateway) -> None:
    name = keep(gateway, text=document(3), cache_salt="ours").json()["id"]
    assert name in stored(gateway, cache_salt="ours")
    assert name not in stored(gateway)
    assert name not in stored(gateway, cache_salt="theirs")
    other = keep(gateway, text=document(3), cache_salt="theirs").json()["id"]
    assert other != name
    for each, salt in ((name, "ours"), (other, "theirs")):
        url = f"{gateway.url}/v1/kv_cache/{each}"
        assert httpx.delete(url, params={"cache_salt": salt}).status_code == 200


def test_a_client_cannot_keep_by_other_ways(gateway: Gateway) -> None:
    before = stored(gateway)
    body = {
        "text": document(4), "sampling_params": {"max_new_tokens": 1, "custom_params": {
            "kv_compression": {"rate": 8, "question_tokens": 5}, "kv_cache_pin": {},
        }},
    }  # fmt: skip
    answer = httpx.post(f"{gateway.url}/generate", json=body, timeout=60)
    assert answer.status_code == 200
    new = [each for name, each in stored(gateway).items() if name not in before]
    assert [each["pinned"] for each in new] == [False]


def test_a_document_may_be_longer_than_the_worker_takes_at_once(gateway: Gateway) -> None:
    """The worker says what its model's context allows."""
    knob = {"rate": 8, "prefill_block": 256}
    long = keep(gateway, input_ids=[5] * 100_000, kv_compression=knob)
    assert long.status_code == 400
    assert "context" in long.text
    made = keep(gateway, text=document(7), kv_compression=knob)
    assert made.status_code == 200, made.text
    assert made.json()["blocks"] == -(-made.json()["tokens"] // 16 // 8)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"text": "k1 k2"}, 409, "nothing_to_compress"),
        ({"text": document(5, 40)}, 409, "nothing_to_compress"),
        ({"input_ids": [5] * 100_000}, 413, "document_too_long"),
        ({"input_ids": [1 << 30] * 100}, 400, None),
        ({"text": "k1", "messages": []}, 400, "invalid_document"),
        ({"messages": [{"role": "user"}]}, 400, None),
    ],
)
def test_what_cannot_be_kept_is_told(
    gateway: Gateway, body: dict[str, Any], status: int, code: str | None
) -> None:
    answer = keep(gateway, **body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert code is None or answer.json()["error"]["code"] == code


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"text": "a", "input_ids": [1]}, "messages"),
        ({"text": 5}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"text": "a", "ttl_s": 0}, "ttl_s"),
        ({"text": "a", "ttl_s": True}, "ttl_s"),
        ({"text": "a", "ttl_s": 1e9}, "ttl_s"),
        ({"text": "a", "cache_salt": 5}, "cache_salt"),
        ({"text": "a", "prefix": 5}, "prefix"),
    ],
)
def test_a_body_that_cannot_be_read_names_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        _checked(body)
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize(
    ("knob", "header", "field"),
    [
        (None, [], "rate"),
        ({"rate": 1}, [], "rate"),
        ({"rate": 8, "question_tokens": 3}, [], "question_tokens"),
        ({"rate": 8, "question": "last_message"}, [], "question"),
        ({"rate": 8, "recompress_every": 16}, [], "recompress_every"),
        ({"rate": "8"}, [], "rate"),
    ],
)
def test_a_knob_that_keeps_nothing_compressed_is_refused(
    knob: dict[str, Any] | None, header: list[str], field: str
) -> None:
    body = {} if knob is None else {"kv_compression": knob}
    with pytest.raises(ApiError) as caught:
        _knob(body, header, Settings(worker_url="http://127.0.0.1:1"))
    assert (caught.value.status, caught.value.param) == (400, f"kv_compression.{field}")


def test_the_knob_is_that_of_a_request_with_a_question() -> None:
    settings = Settings(worker_url="http://127.0.0.1:1")
    for body, header in (({"kv_compression": {"rate": 8}}, []), ({}, ["8"])):
        spec = _knob(body, header, settings)
        assert (spec["rate"], spec["question_tokens"]) == (8, 1)


@pytest.mark.parametrize(
    ("reason", "compressed", "status", "code"),
    [
        (None, True, 507, "documents_full"),
        (None, False, 502, "knob_lost"),
        ("no free blocks to compress into", False, 507, "no_room"),
        ("nothing to remove: ...", False, 409, "nothing_to_compress"),
    ],
)
def test_why_it_was_not_kept(
    reason: str | None, compressed: bool, status: int, code: str
) -> None:
    refused = _refused(reason, compressed)
    assert (refused.status, refused.code) == (status, code)
