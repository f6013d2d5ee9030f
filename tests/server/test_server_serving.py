"""Requests through the gateway to a real SGLang worker with the embedded model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any

import httpx
import openai
import pytest
from kvc_recall.tasks import sample
from kvc_server.demo import DemoFailed, ask, table
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tests.gateways import Gateway

PROMPT = sample("needles8", 512, Random(7))
LONG = "river " * 4097
RESULT_FIELDS = {
    "policy", "rate", "rate_achieved", "prompt_tokens", "kept_per_head", "blocks", "bytes",
    "skipped",
}  # fmt: skip


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


def chat(text: str = PROMPT.text, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "recall", "messages": messages, "max_tokens": 8, "temperature": 0} | more


def compressed(rate: float) -> dict[str, Any]:
    return {"extra_body": {"kv_compression": {"rate": rate}}}


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream; checks that it ends with [DONE]."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def check_report(report: dict[str, Any], rate: float) -> None:
    assert set(report) >= RESULT_FIELDS
    assert report["rate"] == rate
    assert report["prompt_tokens"] == 512
    assert report["blocks"]["before"] == 32
    assert report["skipped"] is None
    if rate == 1:
        assert report["bytes"]["after"] == report["bytes"]["before"]
    else:
        assert report["blocks"]["after"] == 32 // rate
        assert report["bytes"]["after"] * rate == report["bytes"]["before"]


def gauge(gateway: Gateway, name: str) -> float:
    """The sum of a metric's samples, ours or the worker's."""
    text = httpx.get(f"{gateway.url}/metrics", timeout=30).text
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


def test_models_come_from_the_worker(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "recall"
    assert model.model_extra["max_model_len"] == 4096


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
        "POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=60
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


def test_generate(gateway: Gateway) -> None:
    body = {
        "text": f"{PROMPT.text} <answer>",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0},
        "kv_compression": {"rate": 8, "policy": "snapkv"},
    }
    answer = httpx.post(f"{gateway.url}/generate", json=body, timeout=60).json()
    check_report(answer["kv_compression"], 8)
    assert answer["kv_compression"]["policy"] == "snapkv"
    assert "meta_info" in answer
    streamed = httpx.post(f"{gateway.url}/generate", json=body | {"stream": True}, timeout=60)
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
        timeout=60,
    ).json()
    for answer, rate in zip(answers, (2, 4), strict=True):
        check_report(answer["kv_compression"], rate)


def test_header_and_short_prompts(gateway: Gateway) -> None:
    url, header = f"{gateway.url}/v1/chat/completions", {"X-KV-Compression-Rate": "8"}
    answer = httpx.post(url, json=chat(), headers=header, timeout=60).json()
    check_report(answer["kv_compression"], 8)
    short = httpx.post(url, json=chat("hello ?"), headers=header, timeout=60).json()
    assert "min_tokens" in short["kv_compression"]["skipped"]


def test_nothing_said_is_off(gateway: Gateway) -> None:
    for said in ({}, {"kv_compression": None}, {"kv_compression": {"rate": 1}}):
        answer = httpx.post(
            f"{gateway.url}/v1/chat/completions", json=chat(**said), timeout=60
        ).json()
        check_report(answer["kv_compression"], 1)


def test_bytes_pass_as_the_worker_wrote_them(gateway: Gateway) -> None:
    """Seeds and logprobs are SGLang's business; the gateway must neither drop nor rewrite."""
    body = chat(logprobs=True, top_logprobs=3, return_cached_tokens_details=True, seed=1)
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
    assert len(answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["content-type"].startswith("application/json")


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
    answer = httpx.post(gateway.url + path, json=body | {"stream": stream}, timeout=60)
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
    answer = httpx.post(gateway.url + path, json=body, timeout=60)
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
        f"{gateway.url}/v1/chat/completions", json=chat("hello ?", max_tokens=1), timeout=60
    )
    assert answer.status_code == 200


def idle(gateway: Gateway) -> bool:
    """Whether the engine has no request, running or waiting: only then it flushes its cache."""
    answer = httpx.post(f"{gateway.worker_url()}/flush_cache", timeout=30)
    assert answer.status_code in (200, 400)
    return answer.status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(gateway: Gateway, stream: bool) -> None:
    assert eventually(lambda: idle(gateway), within=10)
    body = chat("hello ?", stream=stream, max_tokens=4000, ignore_eos=True)
    url = f"{gateway.url}/v1/chat/completions"
    command = ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as client:
        try:
            assert eventually(lambda: not idle(gateway), within=20)
            assert client.poll() is None
        finally:
            client.kill()
    assert eventually(lambda: idle(gateway), within=10)
    text = httpx.get(f"{gateway.url}/metrics", timeout=30).text
    assert 'kvc_requests_in_flight{endpoint="/v1/chat/completions"} 0.0' in text


def test_what_serve_prints_works_as_pasted(gateway: Gateway) -> None:
    lines = [line for line in gateway.log.read_text().split("\n") if "worker |" not in line]
    (curl,) = (line for line in lines if line.startswith("curl "))
    first = lines.index("from openai import OpenAI")
    last = next(i for i, line in enumerate(lines) if i > first and line.startswith("print("))
    answered = subprocess.run(["bash", "-c", curl], capture_output=True, check=True, timeout=60)
    assert "min_tokens" in json.loads(answered.stdout)["kv_compression"]["skipped"]
    snippet = "\n".join(lines[first : last + 1])
    pasted = subprocess.run(
        [sys.executable, "-c", snippet], capture_output=True, check=True, timeout=60, text=True
    )
    assert "'rate': 8.0" in pasted.stdout


def test_demo_asks_and_prints(gateway: Gateway) -> None:
    with gateway.client(timeout=60) as http:
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


def test_metrics_add_up(gateway: Gateway) -> None:
    before = gauge(gateway, "kvc_kv_bytes_total")
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions",
        json=chat(kv_compression={"rate": 8}, stream=True),
        timeout=60,
    )
    sizes = events(answer.text)[-1]["kv_compression"]["bytes"]
    assert gauge(gateway, "kvc_kv_bytes_total") == before + sizes["before"] + sizes["after"]
    assert gauge(gateway, "kvc_worker_up") == 1
    assert gauge(gateway, "kvc_time_to_first_token_seconds_count") > 0
    assert gauge(gateway, "sglang:prompt_tokens_total") > 0
    short = chat("what is the code for red falcon ?", kv_compression={"rate": 8})
    assert httpx.post(f"{gateway.url}/v1/chat/completions", json=short, timeout=60).is_success
    text = httpx.get(f"{gateway.url}/metrics", timeout=30).text
    assert "kvc_skipped_total{reason=\"the prompt's N tokens are fewer" in text
    assert 'kvc_requests_in_flight{endpoint="/v1/chat/completions"} 0.0' in text
