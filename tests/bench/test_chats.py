"""A chat of ten turns over a document of 2,000 tokens, with the embedded model."""

from __future__ import annotations

import itertools

import pytest

from bench.chats import run
from tests.gateways import Gateway

TURNS = 10
LATER = 80  # tokens: the last window, a block that is not full, and a turn


@pytest.mark.parametrize(("reuse", "seed"), [("full", 0), ("compressed", 1)])
def test_a_turn_begins_with_those_before_it_and_holds_a_fourth(
    gateway: Gateway, reuse: str, seed: int
) -> None:
    """Every turn asks for another fact and is 13 tokens long; what is cached grows by blocks."""
    knob = {"rate": 8, "policy": "kv-compress", "reuse": reuse}
    turns = run(gateway, seed, TURNS, knob)
    assert [turn["skipped"] for turn in turns] == [None] * TURNS
    assert turns[0]["cached"] == 0
    for before, turn in itertools.pairwise(turns):
        assert turn["cached"] >= before["cached"]
        assert turn["prompt"] - turn["cached"] <= LATER
    assert max(turn["held"] for turn in turns) <= 1 / 4
    assert all(turn["right"] for turn in turns), [turn["right"] for turn in turns]
