"""Requests through the gateway to a real SGLang worker with the embedded model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from typing import Any

import httpx
import openai
import pytest
from kvc_server.demo import DemoFailed, ask, table
from rich.console import Console

from tests.gateways import Gateway
from tests.server.chats import PROMPT, chat, check_report, events
from tests.server.test_server_metrics import gauge


def compressed(rate: float) -> dict[str, Any]:
    return {"extra_body": {"kv_compression": {"rate": rate}}}


def test_models_come_from_the_worker(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "recall"
    assert model.model_extra["max_model_len"] == 4096


def test_a_chat_is_tokenized_as_it_is_served(gateway: Gateway) -> None:
    body = {"messages": chat()["messages"]}
    with gateway.client() as client:
        tokens = client.post("/v1/tokenize", json=body).json()["tokens"]
        begun = [*body["messages"], {"role": "assistant", "content": "the code"}]
        more = {"messages": begun, "continue_final_message": True}
        longer = client.post("/v1/tokenize", json=more).json()["tokens"]
        served = client.post("/v1/chat/completions", json=chat()).json()
    assert len(tokens) == served["usage"]["prompt_tokens"]
    assert longer[: len(tokens)] == tokens
    assert len(longer) == len(tokens) + 2


@pytest.mark.parametrize("rate", [1, 8])
def test_chat(client: openai.OpenAI, rate: float) -> None:
    answer = client.chat.completions.create(**chat(), **compressed(rate))
    assert answer.choices[0].message.content.split() == PROMPT.answer.split()
    check_report(answer.model_extra["kv_compression"], rate)


@pytest.mark.parametrize("usage", [False, True])
def test_chat_stream_reports_in_its_last_chunk(client: openai.OpenAI, usage: bool) -> None:
    stream = client.chat.completions.create(
        **chat(stream=True, stream_options={"include_usage": usage}), **compressed(8)
    )
    chunks = list(stream)
    words = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert words.split() == PROMPT.answer.split()
    reports = [chunk.model_extra.get("kv_compression") for chunk in chunks]
    assert reports[:-1] == [None] * (len(chunks) - 1)
    check_report(reports[-1], 8)
    assert (chunks[-1].usage is not None) == usage


def test_streams_are_not_held_back(gateway: Gateway) -> None:
    body = chat(stream=True, max_tokens=200, ignore_eos=True)
    arrivals = []
    with httpx.stream(
        "POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=180
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for _ in answer.iter_raw():
            arrivals.append(time.monotonic())
    assert len(arrivals) > 50
    assert arrivals[len(arrivals) // 2] - arrivals[0] > 0.2 * (arrivals[-1] - arrivals[0])


def test_completions(client: openai.OpenAI) -> None:
    prompt = f"{PROMPT.text} <answer>"
    fields = {"model": "recall", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(**fields, **compressed(4))
    assert answer.choices[0].text.split() == PROMPT.answer.split()
    check_report(answer.model_extra["kv_compression"], 4)
    chunks = list(client.completions.create(**fields, stream=True, **compressed(4)))
    assert "".join(chunk.choices[0].text for chunk in chunks).split() == PROMPT.answer.split()
    check_report(chunks[-1].model_extra["kv_compression"], 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(n=3)),
        ("/v1/completions", {"model": "recall", "prompt": [f"{PROMPT.text} <answer>"] * 3}),
        ("/v1/completions", {"model": "recall", "prompt": [f"{PROMPT.text} <answer>"], "n": 3}),
    ],
)
def test_every_choice_has_its_report(
    gateway: Gateway, path: str, body: dict[str, Any], stream: bool
) -> None:
    body = body | {"kv_compression": {"rate": 8}, "max_tokens": 4, "stream": stream}
    counted = gauge(gateway, "kvc_kv_bytes_total")
    answer = httpx.post(gateway.url + path, json=body, timeout=180)
    told = events(answer.text)[-1] if stream else answer.json()
    reports = told["kv_compression"]
    assert len(reports) == 3
    for report in reports:
        check_report(report, 8)
    told_bytes = sum(sum(report["bytes"].values()) for report in reports)
    shared = sum(report["bytes"]["shared"] for report in reports)
    assert gauge(gateway, "kvc_kv_bytes_total") == counted + told_bytes - shared


@pytest.mark.parametrize("stream", [False, True])
def test_reports_of_several_prompts_are_in_their_order(gateway: Gateway, stream: bool) -> None:
    long, short = f"{PROMPT.text} <answer>", "what is the code for red falcon ? <answer>"
    body = {"model": "recall", "prompt": [short, long, short], "max_tokens": 4, "stream": stream}
    url = f"{gateway.url}/v1/completions"
    answer = httpx.post(url, json=body | {"kv_compression": {"rate": 8}}, timeout=180)
    told = events(answer.text)[-1] if stream else answer.json()
    first, second, third = told["kv_compression"]
    check_report(second, 8)
    for report in (first, third):
        assert report["prompt_tokens"] < 64
        assert "min_tokens" in report["skipped"]


def test_a_list_of_one_prompt_has_one_report(gateway: Gateway) -> None:
    body = {"model": "recall", "prompt": [f"{PROMPT.text} <answer>"], "max_tokens": 4}
    url = f"{gateway.url}/v1/completions"
    answer = httpx.post(url, json=body | {"kv_compression": {"rate": 8}}, timeout=180)
    check_report(answer.json()["kv_compression"], 8)


def test_generate(gateway: Gateway) -> None:
    body = {
        "text": f"{PROMPT.text} <answer>",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0},
        "kv_compression": {"rate": 8, "policy": "snapkv"},
    }
    answer = httpx.post(f"{gateway.url}/generate", json=body, timeout=180).json()
    check_report(answer["kv_compression"], 8)
    assert answer["kv_compression"]["policy"] == "snapkv"
    assert "meta_info" in answer
    streamed = httpx.post(f"{gateway.url}/generate", json=body | {"stream": True}, timeout=180)
    last = events(streamed.text)[-1]
    assert last["text"] == answer["text"]
    check_report(last["kv_compression"], 8)


def test_generate_batch_with_a_rate_each(gateway: Gateway) -> None:
    params = [
        {"max_new_tokens": 2, "custom_params": {"kv_compression": {"rate": rate}}}
        for rate in (2, 4)
    ]
    text = f"{PROMPT.text} <answer>"
    answers = httpx.post(
        f"{gateway.url}/generate",
        json={"text": [text, text], "sampling_params": params},
        timeout=180,
    ).json()
    for answer, rate in zip(answers, (2, 4), strict=True):
        check_report(answer["kv_compression"], rate)


def test_header_and_short_prompts(gateway: Gateway) -> None:
    url, header = f"{gateway.url}/v1/chat/completions", {"X-KV-Compression-Rate": "8"}
    answer = httpx.post(url, json=chat(), headers=header, timeout=180).json()
    check_report(answer["kv_compression"], 8)
    short = httpx.post(url, json=chat("hello ?"), headers=header, timeout=180).json()
    assert "min_tokens" in short["kv_compression"]["skipped"]


def test_nothing_said_is_off(gateway: Gateway) -> None:
    for said in ({}, {"kv_compression": None}, {"kv_compression": {"rate": 1}}):
        answer = httpx.post(
            f"{gateway.url}/v1/chat/completions", json=chat(**said), timeout=180
        ).json()
        check_report(answer["kv_compression"], 1)


def test_bytes_pass_as_the_worker_wrote_them(gateway: Gateway) -> None:
    """Seeds and logprobs are SGLang's business; the gateway must neither drop nor rewrite."""
    body = chat(logprobs=True, top_logprobs=3, return_cached_tokens_details=True, seed=1)
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=180)
    assert len(answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["content-type"].startswith("application/json")


def test_what_serve_prints_works_as_pasted(gateway: Gateway) -> None:
    lines = [line for line in gateway.log.read_text().split("\n") if "worker |" not in line]
    (curl,) = (line for line in lines if line.startswith("curl "))
    first = lines.index("from openai import OpenAI")
    last = next(i for i, line in enumerate(lines) if i > first and line.startswith("print("))
    answered = subprocess.run(["bash", "-c", curl], capture_output=True, check=True, timeout=180)
    assert "min_tokens" in json.loads(answered.stdout)["kv_compression"]["skipped"]
    snippet = "\n".join(lines[first : last + 1])
    pasted = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, check=True, timeout=180, text=True
    )
    assert "'rate': 8.0" in pasted.stdout


def test_demo_asks_and_prints(gateway: Gateway) -> None:
    with gateway.client(timeout=180) as http:
        answers = {rate: ask(http, PROMPT.text, rate) for rate in (1, 8)}
        with pytest.raises(DemoFailed, match="rate 0"):
            ask(http, PROMPT.text, 0)
    assert [answer.text.split() for answer in answers.values()] == [PROMPT.answer.split()] * 2
    assert 0 < answers[8].first_token < 60
    with io.StringIO() as out:
        Console(file=out, width=80).print(table(answers, PROMPT.answer))
        printed = out.getvalue()
    assert printed.count("right") == 2
    assert "…" not in printed
