"""Two keys at one real worker: what each is told, and what neither ever is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sgl_kvc.spec import WORKER_KEYS
from tests.gateways import Gateway, serve
from tests.server.chats import PROMPT, chat
from tests.server.tenants import Keys
from tests.server.test_server_metrics import eventually, idle

SECRET = "mangosteen"
TEXT = f"{PROMPT.text} <answer>"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    few = {"tokens_per_minute": 700}
    return Keys(tmp_path_factory.mktemp("keys") / "keys", a={}, b={"operator": True}, few=few)


@pytest.fixture(scope="module")
def keyed(
    gateway: Gateway, keys: Keys, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A second gateway of the same worker, which asks for keys."""
    environment = gateway.worker().environ()
    worker_keys = {name: environment[name] for name in WORKER_KEYS.values()}
    log = tmp_path_factory.mktemp("keyed") / "log"
    arguments = ("--worker-url", gateway.worker_url(), "--keys", str(keys.path))
    with serve(log, *arguments, **worker_keys) as running:
        running.wait_ready()
        yield running


def cached(answer: dict[str, Any]) -> int:
    """Tokens that came from the prefix cache, as each endpoint tells it."""
    if "meta_info" in answer:
        return answer["meta_info"]["cached_tokens"]
    usage = answer["usage"]
    if "input_tokens" in usage:
        return usage.get("cache_read_input_tokens") or 0
    return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"model": "recall", "prompt": TEXT, "max_tokens": 2}),
        ("/v1/messages", chat()),
        ("/generate", {"text": TEXT, "sampling_params": {"max_new_tokens": 2}}),
        ("/generate", {"text": TEXT, "extra_key": "x", "sampling_params": {"max_new_tokens": 2}}),
    ],
)
def test_two_keys_never_share_entries(
    gateway: Gateway, keyed: Gateway, keys: Keys, path: str, body: dict[str, Any]
) -> None:
    """Not even where the other names its salt: each is told of its own entries alone."""
    assert eventually(lambda: idle(gateway), within=60)

    def ask(name: str, **more: Any) -> int:
        headers = keys.headers(name)
        answer = httpx.post(keyed.url + path, json=body | more, headers=headers, timeout=180)
        assert answer.status_code == 200, answer.text
        return cached(answer.json())

    assert ask("a") == 0
    assert ask("a") > 400
    assert ask("b") == 0
    assert ask("b") > 400
    assert ask("a") > 400


def test_tokens_per_minute_of_real_requests(keyed: Gateway, keys: Keys) -> None:
    headers, url = keys.headers("few"), f"{keyed.url}/v1/chat/completions"
    first = httpx.post(url, json=chat(max_tokens=150), headers=headers, timeout=180)
    assert first.status_code == 200, first.text
    told = first.json()
    used = told["usage"]["prompt_tokens"] + told["usage"]["completion_tokens"]
    report = told["kv_compression"]
    assert used == report["prompt_tokens"] + report["completion_tokens"]
    assert 512 < used < 600, "it ended long before its 150 tokens"
    small = chat("the code ?", max_tokens=700 - used - 40)
    prompt = httpx.post(f"{keyed.url}/v1/tokenize", json=small, headers=headers).json()["count"]
    exact = small | {"max_tokens": 700 - used - prompt, "stream": True, "stop": ["a"]}
    refused = httpx.post(url, json=exact | {"max_tokens": exact["max_tokens"] + 1}, headers=headers)
    assert refused.status_code == 429
    served = httpx.post(url, json=exact, headers=headers, timeout=180)
    assert served.status_code == 200, served.text


def test_documents_are_their_keys(keyed: Gateway, keys: Keys) -> None:
    """Listed and released by who has made them; the namespace is told to nobody."""
    url = f"{keyed.url}/v1/kv_cache"
    body = {"text": PROMPT.text, "kv_compression": {"rate": 8}, "cache_salt": "x"}

    def listed(name: str, **query: str) -> list[dict[str, Any]]:
        answer = httpx.get(url, params=query, headers=keys.headers(name), timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    made = httpx.post(url, json=body, headers=keys.headers("a"), timeout=60)
    assert made.status_code == 200, made.text
    assert made.json()["cache_salt"] == "x"
    assert [each["id"] for each in listed("a", cache_salt="x")] == [made.json()["id"]]
    assert listed("a") == listed("b") == listed("b", cache_salt="x") == []
    one = f"{url}/{made.json()['id']}"
    salt = {"cache_salt": "x"}
    assert httpx.delete(one, params=salt, headers=keys.headers("b")).status_code == 404
    assert httpx.delete(one, params=salt).status_code == 401
    assert httpx.delete(one, params=salt, headers=keys.headers("a")).status_code == 200
    few = [httpx.post(url, json=body, headers=keys.headers("few"), timeout=60) for _ in range(2)]
    assert few[-1].status_code == 429, "it has 700 tokens a minute, and the document has 512"


def test_no_log_line_metric_or_error_holds_a_prompt_or_a_key(
    gateway: Gateway, keyed: Gateway, keys: Keys
) -> None:
    """Whatever goes wrong with a request; an error is no place for what was sent, either."""
    text = f"the code is {SECRET} . "
    guessed = f"kvc-{SECRET}"
    good = chat(text * 10)
    chats: list[dict[str, Any]] = [
        good, good | {"kv_compression": {"rate": 0}}, good | {"temperature": "hot"},
        good | {"max_tokens": 10**6}, good | {"messages": text}, good | {"messages": [text]},
        good | {"messages": [{"role": text, "content": text}]}, good | {"stream": 7},
        chat(text * 2000), good | {"response_format": {"type": "regex"}}, good | {"stop": [1]},
    ]  # fmt: skip
    natives: list[dict[str, Any]] = [
        {"text": [text, 1]}, {"text": {"a": text}}, {"text": text, "input_ids": [1]},
        {"text": text, "sampling_params": {"regex": "("}}, {"input_ids": [10**9], "text": None},
        {"text": text, "sampling_params": {"max_new_tokens": -1}},
        {"text": text, "sampling_params": {"temperature": -1}},
    ]  # fmt: skip
    asked = [("/v1/chat/completions", body) for body in chats]
    asked += [("/v1/messages", body) for body in chats]
    short = {"model": "recall", "max_output_tokens": 8}
    asked += [("/v1/responses", short | {"input": body["messages"]}) for body in chats]
    asked += [("/generate", body) for body in natives]
    asked += [("/v1/score", {"query": text, "items": 1}), ("/v1/tokenize", {"prompt": {"a": text}})]
    headers = keys.headers("a")
    for path, body in asked:
        answer = httpx.post(keyed.url + path, json=body, headers=headers, timeout=180)
        assert answer.status_code < 500, (path, body, answer.text)
        if answer.status_code >= 400:
            assert SECRET not in answer.text, (path, answer.text)
        assert headers["Authorization"][7:] not in answer.text
    for content in (text.encode(), json.dumps(good).encode()[:-1]):
        answer = httpx.post(f"{keyed.url}/generate", content=content, headers=headers)
        assert SECRET not in answer.text
    refused = httpx.post(f"{keyed.url}/generate", headers={"Authorization": f"Bearer {guessed}"})
    assert refused.status_code == 401
    assert SECRET not in refused.text
    told = httpx.get(f"{keyed.url}/metrics", headers=keys.headers("b"), timeout=120).text
    logs = keyed.log.read_text() + gateway.log.read_text()
    for held in (told, logs):
        assert SECRET not in held
        assert not any(key in held for key in keys.keys.values())
