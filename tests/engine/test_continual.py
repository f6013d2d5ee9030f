"""Compression that goes on while a request decodes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.engine.conftest import prompt
from tests.servers import assert_no_leak

BLOCK = 16


def test_thousands_of_tokens_inside_a_budget(server):
    """The mean per head never exceeds the budget, the interval and a block."""
    knob = {"budget": 256, "recompress_every": 128}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            server.generate, prompt(60, seed=1), knob, max_new_tokens=4000, ignore_eos=True
        )
        used = []
        while not answer.done():
            used.append(httpx.get(f"{server.url}/get_load", timeout=60).json()[0]["num_tokens"])
    report = answer.result()["kv_compression"]
    assert len(answer.result()["output_ids"]) == 4000
    assert 256 < report["decode"]["kept_per_head_peak"] <= 256 + 128 + BLOCK
    assert report["decode"]["recompressed"] >= (4000 - 256) // 128
    assert max(used) <= 256 + 128 + 2 * BLOCK, "SGLang's own count of the tokens it holds"
    assert_no_leak(server)


@pytest.mark.parametrize("tokens", [5, 100, 1000])
def test_nothing_changes_before_something_is_removed(server, tokens):
    """Below its budget a request is served from blocks of its own, and right."""
    ids = prompt(tokens, seed=tokens)
    knob = {"budget": 4000, "recompress_every": 32}
    got = server.generate(ids, knob, max_new_tokens=100, ignore_eos=True)
    expected = server.generate(ids, None, max_new_tokens=100, ignore_eos=True)
    assert got["output_ids"] == expected["output_ids"]
    assert got["kv_compression"]["decode"]["recompressed"] == 0


def test_a_rate_lets_the_segment_grow(server):
    knob = {"rate": 4, "recompress_every": 64}
    answer = server.generate(prompt(400, seed=2), knob, max_new_tokens=1200, ignore_eos=True)
    peak = answer["kv_compression"]["decode"]["kept_per_head_peak"]
    assert peak + BLOCK > 1600 / 4
    assert peak <= 1600 / 4 + 64 + 2 * BLOCK


def test_the_budget_decides_what_is_said(server):
    """Compressing again reaches the cache: what is decoded depends on it."""
    ids = prompt(100, seed=3)
    answers = {
        budget: tuple(
            server.generate(
                ids, {"budget": budget, "recompress_every": 32}, max_new_tokens=400,
                ignore_eos=True,
            )["output_ids"]
        )
        for budget in (64, 128, 4000)
    }  # fmt: skip
    assert len(set(answers.values())) == 3


def test_many_at_once(server):
    knobs = [{"budget": 96, "recompress_every": 24}, {"rate": 4}, None]
    asked = [(prompt(90 + 60 * i, seed=30 + i), knobs[i % 3]) for i in range(15)]
    def ask(one):
        return server.generate(*one, max_new_tokens=200, ignore_eos=True)

    with ThreadPoolExecutor(15) as pool:
        answers = list(pool.map(ask, asked))
    for answer, (_, knob) in zip(answers, asked, strict=True):
        assert len(answer["output_ids"]) == 200
        if knob and "budget" in knob:
            assert answer["kv_compression"]["decode"]["recompressed"] >= 6
    assert_no_leak(server)


@pytest.mark.parametrize("policy", ["r-kv", "triattention"])
def test_scores_made_anew(server, policy):
    """By policies that look at the keys again; what they keep is what is decoded from."""
    ids, knob = prompt(300, seed=5), {"policy": policy, "budget": 64, "recompress_every": 32}
    answer = server.generate(ids, knob, max_new_tokens=400, ignore_eos=True)
    report = answer["kv_compression"]
    assert report["skipped"] is None
    assert report["decode"]["recompressed"] >= 400 // 48
    assert 64 < report["decode"]["kept_per_head_peak"] <= 64 + 32 + 2 * BLOCK
    again = server.generate(ids, knob, max_new_tokens=400, ignore_eos=True)
    assert again["output_ids"] == answer["output_ids"]
    once = server.generate(ids, knob | {"recompress_every": 0}, max_new_tokens=400, ignore_eos=True)
    assert once["output_ids"] != answer["output_ids"]
    assert_no_leak(server)
