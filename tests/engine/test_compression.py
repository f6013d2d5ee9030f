"""Compression in SGLang's real scheduler: what is freed, what is shared, what is said."""

from __future__ import annotations

import math

import httpx
import pytest

from sgl_kvc.spec import PRESETS, methods
from tests.engine.conftest import prompt

BLOCK = 16
LAYERS, HEADS, DIM = 4, 4, 32
BLOCK_BYTES = BLOCK * LAYERS * HEADS * 2 * DIM * 4


@pytest.mark.parametrize("tokens", [100, 256, 1000, 1007])
@pytest.mark.parametrize("rate", [2, 8, 32])
def test_blocks_are_as_designed(server, tokens, rate):
    """Segment: the whole blocks over the rate, rounded up. Tail: the rest, one block."""
    report = server.generate(prompt(tokens, seed=tokens), {"rate": rate})["kv_compression"]
    whole, rest = divmod(tokens, BLOCK)
    segment = max(1, math.ceil(whole / rate))
    tail_blocks = 1 if rest else 0
    after = segment + tail_blocks
    assert report["blocks"] == {"before": whole + tail_blocks, "after": after, "shared": 0}
    assert report["bytes"]["before"] == (whole + tail_blocks) * BLOCK_BYTES
    assert report["bytes"]["after"] == (segment + tail_blocks) * BLOCK_BYTES
    assert report["kept_per_head"]["mean"] == segment * BLOCK + rest
    assert report["rate_achieved"] == pytest.approx(tokens / (segment * BLOCK + rest), abs=1e-3)
    assert (report["policy"], report["rate"], report["skipped"]) == ("kv-compress", rate, None)


def test_heads_keep_different_numbers(server):
    kept = server.generate(prompt(1000, seed=1), {"rate": 8})["kv_compression"]["kept_per_head"]
    assert kept["min"] < kept["mean"] < kept["max"]


def test_budget(server):
    report = server.generate(prompt(1000, seed=2), {"budget": 100})["kv_compression"]
    assert report["kept_per_head"]["mean"] == math.ceil(100 / BLOCK) * BLOCK + 1000 % BLOCK
    assert report["rate"] is None


@pytest.mark.parametrize("policy", sorted(PRESETS))
def test_presets(server, policy):
    report = server.generate(prompt(1000, seed=3), {"rate": 8, "policy": policy})["kv_compression"]
    needs = methods("scorers")[PRESETS[policy].scorer].needs
    if "head_profile" in needs + methods("apportioners")[PRESETS[policy].apportioner].needs:
        assert "head profile" in report["skipped"]
        return
    kept = report["kept_per_head"]
    assert report["policy"] == policy
    assert report["skipped"] is None
    if PRESETS[policy].apportioner == "uniform":
        assert kept["min"] == kept["max"]


def test_scorer_and_apportioner_by_name(server):
    knob = {"rate": 8, "scorer": "random", "apportioner": "global"}
    report = server.generate(prompt(1000, seed=4), knob)["kv_compression"]
    assert report["policy"] == "random+global"
    assert report["kept_per_head"]["min"] < report["kept_per_head"]["max"]


def test_policies_differ(server):
    """The policy reaches the cache: what is decoded depends on it."""
    ids = prompt(1000, seed=5)
    answers = {
        policy: tuple(server.generate(ids, {"rate": 16, "policy": policy})["output_ids"])
        for policy in PRESETS
    }
    assert len(set(answers.values())) > len(PRESETS) / 2


def test_freed_blocks_are_free_for_others(server):
    """While a compressed request decodes, SGLang counts its prompt as reclaimable."""
    with server.client() as client:
        client.post("/flush_cache", params={"timeout": 10})
        used = {}
        for rate in (1, 8):
            body = {
                "input_ids": prompt(1600, seed=6),
                "stream": True,
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": 400,
                    "ignore_eos": True,
                    "custom_params": {"kv_compression": {"rate": rate}},
                },
            }
            with client.stream("POST", "/generate", json=body) as stream:
                lines = stream.iter_lines()
                for _ in range(40):
                    next(lines)
                used[rate] = _used_tokens(server.url)
        segment = math.ceil(1600 / BLOCK / 8) * BLOCK
        assert used[1] >= 1600
        assert segment <= used[8] <= segment + 400
        assert used[1] - used[8] >= 1600 - segment - 400


def _used_tokens(url: str) -> int:
    """Tokens of the pool that are neither free nor evictable, as SGLang reports its load."""
    return httpx.get(f"{url}/get_load", timeout=60).json()[0]["num_tokens"]


def test_a_compressed_prompt_stays_a_prefix_for_others(server):
    ids = prompt(1000, seed=7)
    server.generate(ids, {"rate": 8})
    again = server.generate(ids + prompt(50, seed=8), None)
    assert again["meta_info"]["cached_tokens"] == 1000 // BLOCK * BLOCK
    assert again["kv_compression"]["policy"] is None


def test_chunked_prefill_scores_the_same(server):
    """A prompt longer than a prefill chunk, cold and with all but its last chunk cached."""
    ids = prompt(2300, seed=9)
    cold = server.generate(ids, {"rate": 8})
    warm = server.generate(ids, {"rate": 8})
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] > 2200
    assert cold["kv_compression"] == warm["kv_compression"]
    assert cold["output_ids"] == warm["output_ids"]


def test_a_scorer_of_all_queries_sees_them_all_or_remembers(server):
    """Nothing of a prompt it does not know comes from the prefix cache, all of one it does."""
    ids = prompt(1000, seed=14)
    server.generate(ids, None)
    unknown = server.generate(ids, {"rate": 8, "policy": "h2o"})
    known = server.generate(ids, {"rate": 4, "policy": "h2o"})
    assert unknown["meta_info"]["cached_tokens"] == 0
    assert known["meta_info"]["cached_tokens"] > 900
    server.client().post("/flush_cache", params={"timeout": 10})
    cold = server.generate(ids, {"rate": 4, "policy": "h2o"})
    assert cold["meta_info"]["cached_tokens"] == 0
    assert cold["output_ids"] == known["output_ids"]
    assert cold["kv_compression"] == known["kv_compression"]


@pytest.mark.parametrize(
    ("tokens", "knob", "why"),
    [
        (20, {"rate": 8}, "min_tokens"),
        (20, {"rate": 8, "min_tokens": 0}, "nothing to remove"),
        (90, {"rate": 1.01}, "nothing to remove"),
        (90, {"budget": 4000}, "nothing to remove"),
    ],
)
def test_what_cannot_be_compressed_is_served_and_says_so(server, tokens, knob, why):
    answer = server.generate(prompt(tokens, seed=10), knob)
    assert len(answer["output_ids"]) == 16
    report = answer["kv_compression"]
    assert why in report["skipped"]
    assert report["blocks"]["before"] == report["blocks"]["after"]


def test_one_token_needs_no_compression(server):
    answer = server.generate(prompt(500, seed=11), {"rate": 8}, max_new_tokens=1)
    assert "no token is decoded" in answer["kv_compression"]["skipped"]


@pytest.mark.parametrize(
    ("knob", "field"),
    [({"rate": 0.5}, "rate"), ({"rate": 8, "x": 1}, "x"), ({"rate": 8, "policy": "no"}, "policy")],
)
def test_a_bare_worker_refuses_a_bad_knob(server, knob, field):
    with server.client() as client:
        body = {"input_ids": [5, 6], "sampling_params": {"custom_params": {"kv_compression": knob}}}
        answer = client.post("/generate", json=body)
        chat = {
            "model": "m",
            "messages": [{"role": "user", "content": "w1"}],
            "custom_params": {"kv_compression": knob},
        }
        assert answer.status_code == client.post("/v1/chat/completions", json=chat).status_code
    assert answer.status_code == 400
    assert f"kv_compression.{field}" in answer.text


def test_batch_and_parallel_sampling_report_each(server):
    with server.client() as client:
        ids = [prompt(400, seed=12), prompt(800, seed=13)]
        body = {
            "input_ids": ids,
            "sampling_params": {
                "max_new_tokens": 4,
                "custom_params": {"kv_compression": {"rate": 4}},
            },
        }
        answers = client.post("/generate", json=body).json()
        assert [a["kv_compression"]["prompt_tokens"] for a in answers] == [400, 800]
        body = {"input_ids": ids[0], "sampling_params": body["sampling_params"] | {"n": 3}}
        answers = client.post("/generate", json=body).json()
        assert [a["kv_compression"]["skipped"] for a in answers] == [None] * 3
