"""Prompts longer than the pool, on the real engine."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from kvc_server.generate import generate_body

from tests.engine.conftest import prompt
from tests.servers import Engine, assert_no_leak, sglang

POOL, PAGE = 1024, 16
#: 12 blocks are kept, 16 come in at a time: 29 of the pool's 64.
KNOB = {"budget": 192, "prefill_block": 256, "policy": "kv-compress"}
BOUND = 12 + 16 + 1
APART = KNOB | {"policy": "virtual-repeat", "question_tokens": 20}


@pytest.fixture(scope="module")
def tight_server(tiny_llama) -> Iterator[Engine]:
    """It logs every step, and the pool's usage to two decimals: less than a block of 64."""
    args = ("--max-total-tokens", str(POOL), "--decode-log-interval", "1",
            "--chunked-prefill-size", "128")  # fmt: skip
    with sglang(tiny_llama, *args) as running:
        yield running


def usages(log: str) -> list[float]:
    """Of the pool, by what is neither free nor can be evicted, at every step."""
    return [float(each) for each in re.findall(r"token usage: ([\d.]+)", log)]


@pytest.mark.parametrize(
    "knob", [KNOB, KNOB | {"policy": "virtual-repeat"}, APART], ids=["window", "all", "apart"]
)
def test_a_prompt_three_times_the_pool_is_served_within_its_bound(tight_server, knob):
    before = len(tight_server.log.read_text())
    ids = prompt(3 * POOL + 100, seed="long")
    answer = tight_server.generate(ids, knob, max_new_tokens=24, ignore_eos=True)
    assert len(answer["output_ids"]) == 24
    report = answer["kv_compression"]
    assert report["skipped"] is None
    assert report["prompt_tokens"] == len(ids)
    assert report["kept_per_head"]["mean"] <= 192 + PAGE + 20
    assert report["prefill"]["block"] == 256
    assert report["prefill"]["compressed"] >= 11
    assert 12 + 16 <= report["prefill"]["blocks_peak"] <= BOUND
    time.sleep(0.5)
    used = usages(tight_server.log.read_text()[before:])
    assert len(used) >= 20, "every step is logged"
    assert max(used) <= BOUND * PAGE / POOL + 0.01
    assert_no_leak(tight_server)


def test_without_it_such_a_prompt_is_refused(tight_server):
    for knob in (None, {"budget": 192}, {"rate": 1.2, "prefill_block": 256}):
        body = generate_body(prompt(3 * POOL, seed="long"), knob)
        with tight_server.client() as client:
            response = client.post("/generate", json=body)
        assert response.status_code == 400
        assert "maximum allowed length" in response.text


def test_the_models_context_stays_the_limit(tight_server):
    fits, too_long = prompt(4080, seed="long"), prompt(4095, seed="long")
    answer = tight_server.generate(fits, KNOB, max_new_tokens=8, ignore_eos=True)
    assert len(answer["output_ids"]) == 8
    with tight_server.client() as client:
        assert client.post("/generate", json=generate_body(too_long, KNOB)).status_code == 400


def test_many_at_once_share_the_pool(tight_server):
    """Their prompts are 13 times the pool; what they hold at a time is what is counted."""
    lengths = [3000, 200, 1500, 90, 2500, 700, 2000, 300, 40, 3000]

    def ask(number: int) -> dict:
        ids = prompt(lengths[number], seed=f"many {number}")
        knob = KNOB if lengths[number] > 600 else None
        return tight_server.generate(ids, knob, max_new_tokens=30, ignore_eos=True)

    with ThreadPoolExecutor(len(lengths)) as pool:
        answers = list(pool.map(ask, range(len(lengths))))
    assert [len(each["output_ids"]) for each in answers] == [30] * len(lengths)
    for length, answer in zip(lengths, answers, strict=True):
        if length > 600:
            assert answer["kv_compression"]["prefill"]["blocks_peak"] <= BOUND
    assert_no_leak(tight_server)


def test_several_answers_to_one_prompt(tight_server):
    """SGLang shows the prompt to the cache first, by a request without an answer."""
    ids = prompt(2 * POOL, seed="several")
    found = tight_server.generate(ids, KNOB, max_new_tokens=8, ignore_eos=True, n=2)
    assert [len(each["output_ids"]) for each in found] == [8, 8]
    assert found[0]["output_ids"] == found[1]["output_ids"]
    assert_no_leak(tight_server)


def test_an_abort_in_mid_prompt_leaks_nothing(tight_server):
    ids = prompt(4000, seed="abort")
    for patience in (0.05, 0.2, 0.4):
        with tight_server.client(timeout=patience) as client, pytest.raises(httpx.TimeoutException):
            client.post("/generate", json=generate_body(ids, KNOB, max_new_tokens=80))
    assert_no_leak(tight_server)
    again = tight_server.generate(ids, KNOB, max_new_tokens=4, ignore_eos=True)
    assert len(again["output_ids"]) == 4


def test_a_document_longer_than_the_pool_is_prefilled_once(tight_server):
    document = prompt(3 * POOL, seed="document")
    cached, answers = [], []
    for number in (1, 2, 1):
        ids = document + prompt(20, seed=f"question {number}")
        answers.append(tight_server.generate(ids, APART, max_new_tokens=8, ignore_eos=True))
        cached.append(answers[-1]["meta_info"]["cached_tokens"])
    assert cached == [0, 3072, 3072 + PAGE], "and the question's whole block, once it was asked"
    assert answers[0]["output_ids"] == answers[2]["output_ids"]
    assert_no_leak(tight_server)
