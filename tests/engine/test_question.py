"""A question that is read after compression: no score sees it, and it sees what was kept."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvc_server.generate import generate_body

from tests.engine.conftest import prompt
from tests.servers import assert_no_leak

BLOCK = 16


@pytest.mark.parametrize(("tokens", "question"), [(1000, 30), (1000, 8), (2300, 100), (700, 400)])
def test_only_what_comes_before_the_question_is_compressed(server, tokens, question):
    """Prompts longer than a prefill chunk, questions longer than what is kept."""
    knob = {"rate": 8, "question_tokens": question}
    report = server.generate(prompt(tokens, seed=tokens + question), knob)["kv_compression"]
    whole = (tokens - question) // BLOCK
    tail = tokens - whole * BLOCK
    segment = math.ceil(whole / 8)
    assert report["skipped"] is None
    assert report["prompt_tokens"] == tokens
    assert report["kept_per_head"]["mean"] == segment * BLOCK + tail
    assert report["blocks"]["after"] == segment + math.ceil(tail / BLOCK)


def test_the_choice_does_not_depend_on_the_question(server):
    context = prompt(992, seed=1)
    inside, apart, default = {"policy": "kv-compress"}, {"policy": "kv-compress"}, {}
    for knob in (apart, default):
        knob["question_tokens"] = 24
    shares = []
    for knob in (inside, apart, default):
        asked = [context + prompt(24, seed=50 + seed) for seed in range(4)]
        reports = [server.generate(ids, knob | {"rate": 2})["kv_compression"] for ids in asked]
        shares.append({tuple(report["kept_per_head"].items()) for report in reports})
    assert [len(each) for each in shares[1:]] == [1, 1]
    assert len(shares[0]) > 1, "the heads' shares do not tell questions apart: a weak test"


def test_the_answer_does_not_depend_on_the_cache(server):
    ids, knob = prompt(1500, seed=2), {"rate": 8, "question_tokens": 40}
    server.client().post("/flush_cache", params={"timeout": 10})
    cold, warm = server.generate(ids, knob), server.generate(ids, knob)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] > 1400
    assert cold["output_ids"] == warm["output_ids"]
    assert cold["kv_compression"] == warm["kv_compression"]


def test_a_question_apart_changes_the_answer(server):
    """It is read over the compressed context, not over the full one."""
    ids, knob = prompt(1000, seed=3), {"rate": 32, "question_tokens": 200}
    full, inside = _logprob(server, ids, None), _logprob(server, ids, {"rate": 32})
    assert inside == pytest.approx(full, abs=1e-6)
    assert _logprob(server, ids, knob) != pytest.approx(full, abs=1e-4)


def _logprob(server, ids: list[int], knob: dict | None) -> float:
    """Of the first token of the answer."""
    body = generate_body(ids, knob, max_new_tokens=1) | {"return_logprob": True}
    with server.client() as client:
        answer = client.post("/generate", json=body).json()
    return answer["meta_info"]["output_token_logprobs"][0][0]


def test_many_at_once(server):
    """Cut prompts, long ones cut by the budget and whole ones share batches and give the same."""
    apart = [{"rate": 4, "question_tokens": 20}, {"rate": 8, "question_tokens": 1}]
    knobs = [None, {"rate": 8}, *apart]
    asked = [(prompt(200 + 97 * i, seed=100 + i), knobs[i % 4]) for i in range(24)]
    alone = [server.generate(ids, knob)["output_ids"] for ids, knob in asked]
    server.client().post("/flush_cache", params={"timeout": 10})
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda one: server.generate(*one), asked))
    assert [answer["output_ids"] for answer in together] == alone
    assert [a["kv_compression"]["skipped"] for a in together] == [None] * 24
    assert_no_leak(server)


def test_no_room_to_compress_before_the_question(small_server):
    """The pool is full when the context is read: the answer comes from the full cache."""
    ids, knob = prompt(2000, seed=4), {"rate": 2, "question_tokens": 40}
    plain = small_server.generate(ids)["output_ids"]
    small_server.client().post("/flush_cache", params={"timeout": 10})
    other = generate_body(prompt(1800, seed=5), max_new_tokens=250, ignore_eos=True)
    with (
        small_server.client() as client,
        client.stream("POST", "/generate", json=other | {"stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        answer = small_server.generate(ids, knob)
        assert sum(line.startswith("data: {") for line in lines) > 0, "the other one had ended"
    assert answer["kv_compression"]["skipped"] == "no free blocks to compress into"
    assert answer["output_ids"] == plain
    assert_no_leak(small_server)
