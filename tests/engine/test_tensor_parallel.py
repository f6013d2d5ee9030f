"""Heads shared out to two processes: each rank compresses its own, with a budget of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.conftest import prompt
from tests.servers import Engine, assert_no_leak, sglang

KNOBS = [
    None,
    {"rate": 4, "policy": "snapkv"},
    {"rate": 4},
    {"rate": 4, "question_tokens": 20},
    {"budget": 48, "recompress_every": 16, "policy": "snapkv"},
    {"rate": 4, "scorer": "attention-window", "apportioner": "uniform", "half_life": 3.0},
    {"rate": 4, "scorer": "virtual-repeat", "apportioner": "uniform", "leverage": 1.0},
    {"rate": 4, "policy": "snapkv", "reuse": "compressed", "hold_s": 600},
    {"rate": 4, "scorer": "virtual-repeat", "apportioner": "uniform", "leverage": 1.0,
     "prefill_block": 64},
    {"rate": 4, "prefill_block": 48},
]
APART, CHAT = 3, 7


def answers(server: Engine) -> list[dict]:
    found = [
        server.generate(prompt(200, seed=seed), knob, max_new_tokens=24, ignore_eos=True)
        for seed, knob in enumerate(KNOBS)
    ]
    document = prompt(200, seed=APART)[:-20]
    found.append(server.generate([*document, *prompt(20, seed="again")], KNOBS[APART]))
    said = [*prompt(200, seed=CHAT), *found[CHAT]["output_ids"], *prompt(30, seed="next turn")]
    found.append(server.generate(said, KNOBS[CHAT]))
    assert_no_leak(server)
    return found


def crowd(server: Engine) -> None:
    """More than the pool holds: what one rank compresses the other has to, too."""
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(
            lambda i: server.generate(prompt(800, seed=f"crowd {i}"), {"on_pressure": 4}),
            range(8),
        ))  # fmt: skip
    assert {each["kv_compression"]["rate"] for each in made} == {1, 4}
    assert_no_leak(server)


@pytest.fixture(scope="module")
def alone_and_parallel(tiny_llama, server) -> tuple[list[dict], list[dict]]:
    # SGLang binds a rank to a NUMA node unless it is told the cores.
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with sglang(tiny_llama, "--max-total-tokens", "4096", "--tp-size", "2", **cores) as parallel:
        found = answers(server), answers(parallel)
        crowd(parallel)
        return found


@pytest.mark.parametrize("number", range(len(KNOBS)))
def test_two_ranks_hold_what_one_holds(alone_and_parallel, number):
    """A rank's pool has half of the heads, so a block half of the bytes."""
    alone, parallel = (answers[number]["kv_compression"] for answers in alone_and_parallel)
    for key in ("before", "after"):
        assert parallel["bytes"][key] == alone["bytes"][key] / 2
        assert parallel["blocks"][key] == alone["blocks"][key]
    assert parallel["kept_per_head"]["mean"] == alone["kept_per_head"]["mean"]


def test_two_ranks_compress_at_the_same_places(alone_and_parallel):
    """While a prompt comes in."""
    for number in (8, 9):
        alone, parallel = (answers[number]["kv_compression"] for answers in alone_and_parallel)
        assert parallel["prefill"] == alone["prefill"]
        assert alone["prefill"]["compressed"] == 3


def test_two_ranks_share_a_documents_segment(alone_and_parallel):
    """Another question on it is asked last but one."""
    for answers in alone_and_parallel:
        assert answers[-2]["meta_info"]["cached_tokens"] == 176
        again, first = (answers[number]["kv_compression"] for number in (-2, APART))
        assert again | {"completion_tokens": 24} == first


def test_two_ranks_go_on_with_a_chats_turn(alone_and_parallel):
    for answers in alone_and_parallel:
        assert answers[-1]["kv_compression"]["begun_with"] == 192


@pytest.mark.parametrize("number", [0, 1, 4, 5, 6, 7, 8, 11])
def test_where_ranks_do_not_compete_two_answer_as_one(alone_and_parallel, number):
    """Where every head keeps the same, it does not matter whose head it is."""
    alone, parallel = (answers[number] for answers in alone_and_parallel)
    assert parallel["output_ids"] == alone["output_ids"]
    assert parallel["kv_compression"]["kept_per_head"] == alone["kv_compression"]["kept_per_head"]
