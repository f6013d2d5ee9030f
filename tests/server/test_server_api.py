"""Every endpoint through the gateway, beside the bare worker: the same, field by field."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest
from kvc_server import routes
from kvc_server.openapi import document, knob_schema

from sgl_kvc.spec import FIELDS, INTEGERS
from tests.gateways import Gateway
from tests.server.chats import PROMPT, chat, check_report
from tests.server.test_server_metrics import eventually, idle

TEXT = f"{PROMPT.text} <answer>"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
MUST = {"tools": [TOOL], "tool_choice": "required"}
SCHEMA = {"type": "object", "properties": {"code": {"type": "boolean"}}, "required": ["code"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA}}
COMPLETION = {"model": "recall", "prompt": TEXT, "max_tokens": 8, "temperature": 0}
RESPONSE = {"model": "recall", "input": PROMPT.text, "max_output_tokens": 8, "temperature": 0}
MESSAGE = {"model": "recall", "max_tokens": 8, "temperature": 0,
           "messages": [{"role": "user", "content": PROMPT.text}]}  # fmt: skip
SCORE = {"model": "recall", "query": "the code", "items": ["for", "red"], "label_token_ids": [1, 2]}
NATIVE = {"text": TEXT, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

CASES = {
    "chat": ("/v1/chat/completions", chat()),
    "tools": ("/v1/chat/completions", chat(tools=[TOOL])),
    "a tool that must be called": ("/v1/chat/completions", chat(**MUST)),
    "response format": ("/v1/chat/completions", chat(response_format=FORMAT, max_tokens=20)),
    "logprobs": ("/v1/chat/completions", chat(logprobs=True, top_logprobs=2)),
    "n": ("/v1/chat/completions", chat(n=2)),
    "stop": ("/v1/chat/completions", chat(stop=["a", "e"])),
    "stream": ("/v1/chat/completions", chat(**USAGE)),
    "stream of tools": ("/v1/chat/completions", chat(**MUST, **USAGE)),
    "stream of logprobs": ("/v1/chat/completions", chat(logprobs=True, stream=True)),
    "completion": ("/v1/completions", COMPLETION),
    "completion with echo": ("/v1/completions", COMPLETION | {"echo": True, "logprobs": 1}),
    "completions": ("/v1/completions", COMPLETION | {"prompt": [TEXT, "the code"], "n": 2}),
    "stream of a completion": ("/v1/completions", COMPLETION | USAGE),
    "responses": ("/v1/responses", RESPONSE),
    "stream of responses": ("/v1/responses", RESPONSE | {"stream": True}),
    "messages": ("/v1/messages", MESSAGE),
    "stream of messages": ("/v1/messages", MESSAGE | {"stream": True}),
    "count tokens": ("/v1/messages/count_tokens", MESSAGE),
    "generate": ("/generate", NATIVE),
    "stream of generate": ("/generate", NATIVE | {"stream": True}),
    "embeddings": ("/v1/embeddings", {"model": "recall", "input": "the code"}),
    "classify": ("/v1/classify", {"model": "recall", "input": "the code"}),
    "score": ("/v1/score", SCORE),
    "rerank": ("/v1/rerank", {"query": "the code", "documents": ["red", "falcon"]}),
    "tokenize": ("/v1/tokenize", {"model": "recall", "prompt": "the code"}),
    "tokenize by its short name": ("/tokenize", {"model": "recall", "prompt": "the code"}),
    "detokenize": ("/v1/detokenize", {"model": "recall", "tokens": [5, 6]}),
    "detokenize by its short name": ("/detokenize", {"model": "recall", "tokens": [5, 6]}),
}  # fmt: skip
#: Of a moment, or made up anew for each request.
FLEETING = {
    "id", "created", "created_at", "completed_at", "meta_info", "item_id", "system_fingerprint",
    "prompt_tokens_details", "kv_compression", "call_id", "output_item_id", "sequence_number",
}  # fmt: skip

#: Texts of which a stream's events hold a part.
JOINED = frozenset({"content", "text", "delta", "arguments", "partial_json"})


def settled(value: Any) -> Any:
    """A JSON value without what differs between two answers to the same request."""
    if isinstance(value, dict):
        return {name: settled(item) for name, item in value.items() if name not in FLEETING}
    return [settled(item) for item in value] if isinstance(value, list) else value


def told(answer: httpx.Response) -> Any:
    """A body; of a stream every line, the JSON of it parsed."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    lines = [line for line in answer.text.split("\n") if line]
    return [json.loads(line[6:]) if line.startswith("data: {") else line for line in lines]


def folded(events: Any) -> Any:
    """A stream's events as one: how many tokens came in one depends on the moment."""
    if not isinstance(events, list):
        return events
    whole: Any = {}
    for event in events:
        whole = _joined(whole, event) if isinstance(event, dict) else whole
    return whole, [line for line in events if line == "data: [DONE]"]


def _joined(old: Any, new: Any, name: str = "") -> Any:
    """Texts one after the other, lists too or by index, of all else what is newer."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _joined(old.get(key), value, key) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list):
        if not all(isinstance(item, dict) and "index" in item for item in old + new):
            return old + new
        by_index = {item["index"]: item for item in old}
        for item in new:
            by_index[item["index"]] = _joined(by_index.get(item["index"]), item)
        return list(by_index.values())
    texts = isinstance(old, str) and isinstance(new, str)
    return old + new if texts and name in JOINED else old if new is None else new


def flush(gateway: Gateway) -> None:
    assert eventually(lambda: idle(gateway), within=60)


@pytest.mark.parametrize("case", CASES)
def test_the_same_as_the_worker_itself(gateway: Gateway, case: str) -> None:
    path, body = CASES[case]
    flush(gateway)
    url, headers = gateway.worker_url() + path, gateway.worker_headers()
    theirs = httpx.post(url, json=body, headers=headers, timeout=180)
    flush(gateway)
    ours = httpx.post(gateway.url + path, json=body, timeout=180)
    assert ours.status_code == theirs.status_code
    dropped = {"date", "server", "content-length", "transfer-encoding", "connection"}
    if theirs.status_code != 200:
        assert ours.json()["error"]["message"]
        return
    for name, value in theirs.headers.items():
        assert name in dropped or ours.headers[name] == value
    if body.get("stream") and path == "/generate":  # each event holds all so far
        assert settled(told(ours)[-2]) == settled(told(theirs)[-2])
    else:
        assert folded(settled(told(ours))) == folded(settled(told(theirs)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)]
)
def test_the_knob_where_bodies_have_no_place_for_it(
    gateway: Gateway, path: str, body: dict[str, Any], stream: bool
) -> None:
    """And no client can put its own where the gateway tells the worker."""
    body = body | {"stream": stream, "kv_compression": {"rate": 8}}
    headers = {"X-KV-Compression": '{"rate": 2}'}
    answer = told(httpx.post(gateway.url + path, json=body, headers=headers, timeout=180))
    last = [event for event in answer if isinstance(event, dict)][-1] if stream else answer
    check_report(last["kv_compression"], 8)
    assert json.dumps(answer).count('"kv_compression"') == 1
    rate = {"X-KV-Compression-Rate": "4"}
    del body["kv_compression"]
    last = told(httpx.post(gateway.url + path, json=body, headers=rate, timeout=180))
    last = [event for event in last if isinstance(event, dict)][-1] if stream else last
    check_report(last["kv_compression"], 4)


def test_clients_of_other_apis(gateway: Gateway, client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"extra_body": {"kv_compression": {"rate": 8}}}
    answer = client.responses.create(**RESPONSE, **more)
    assert answer.output_text.split() == PROMPT.answer.split()
    check_report(answer.model_extra["kv_compression"], 8)
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    *_, last = client.responses.create(**RESPONSE, stream=True, **more)
    assert last.type == "response.completed"
    check_report(last.model_extra["kv_compression"], 8)

    claude = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0)
    asked = {name: MESSAGE[name] for name in ("model", "max_tokens", "messages")}
    more["extra_body"]["temperature"] = 0
    message = claude.messages.create(**asked, **more)
    assert message.content[0].text.split() == PROMPT.answer.split()
    check_report(message.model_extra["kv_compression"], 8)
    *_, last = claude.messages.create(**asked, stream=True, **more)
    assert last.type == "message_stop"
    check_report(last.model_extra["kv_compression"], 8)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_bad_knob_is_refused_everywhere(gateway: Gateway, path: str) -> None:
    hidden = {"custom_params": {"kv_compression": {"rate": 8}}}
    wrong = {"kv_compression.rate": {"kv_compression": {"rate": 0}},
             "custom_params.kv_compression": hidden}  # fmt: skip
    for param, knob in wrong.items():
        answer = httpx.post(gateway.url + path, json={**RESPONSE, **MESSAGE, **knob}, timeout=180)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


def test_models_are_retrieved(gateway: Gateway, client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    found = client.models.retrieve("recall")
    assert settled(found.model_dump()) == settled(listed.model_dump())
    with pytest.raises(openai.NotFoundError, match="a/b") as caught:
        client.models.retrieve("a/b")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "name", ["x", "resp_", "resp_a.b", "resp_a%2fb", "..", "resp_a%3fb", "resp_%C3%A9"]
)
def test_what_cannot_be_a_response_does_not_reach_the_worker(lonely: Gateway, name: str) -> None:
    answers = [httpx.get(f"{lonely.url}/v1/responses/{name}", follow_redirects=False),
               httpx.post(f"{lonely.url}/v1/responses/{name}/cancel")]  # fmt: skip
    assert [answer.status_code for answer in answers] == [404, 404]


def test_the_document_tells_all_there_is(gateway: Gateway) -> None:
    told = httpx.get(f"{gateway.url}/openapi.json").json()
    assert told == json.loads(json.dumps(document()))
    paths = {*routes.GENERATING, *routes.PASSED, *routes.OWN, routes.MODELS, routes.RESPONSE,
             routes.CANCEL, routes.MODEL_INFO, routes.GET_MODEL_INFO, routes.DOCUMENTS,
             routes.DOCUMENT,
             "/v1/models/{model}"}  # fmt: skip
    assert set(told["paths"]) == paths
    fields = knob_schema()["anyOf"][1]["properties"]
    assert set(fields) >= set(FIELDS)
    assert all(fields[name] for name in (*FIELDS, *INTEGERS))


def test_an_endless_stream_of_another_api_ends_with_its_client(gateway: Gateway) -> None:
    flush(gateway)
    body = MESSAGE | {"max_tokens": 3000, "stream": True, "stop_sequences": ["never"]}
    with httpx.stream("POST", f"{gateway.url}/v1/messages", json=body, timeout=180) as answer:
        next(answer.iter_raw())
    begin = time.monotonic()
    flush(gateway)
    assert time.monotonic() - begin < 5
