"""A chat of ten turns over a document of 2,000 tokens, with the embedded model."""

from __future__ import annotations

import itertools

import httpx
import pytest

from bench.chats import run
from tests.gateways import Gateway

TURNS = 10


@pytest.mark.parametrize("reuse", ["full", "compressed", "both"])
def test_every_turn_is_right_begins_with_more_and_holds_a_fourth(gateway: Gateway, reuse: str):
    """Every turn asks for another fact."""
    knob = {"rate": 8, "policy": "kv-compress", "reuse": reuse}
    turns = run(gateway, 0, TURNS, knob)
    assert [turn["skipped"] for turn in turns] == [None] * TURNS
    cached = [turn["cached"] for turn in turns]
    assert all(before < after for before, after in itertools.pairwise(cached)), cached
    assert max(turn["held"] for turn in turns) <= 1 / 4
    assert all(turn["right"] for turn in turns), [turn["right"] for turn in turns]
    assert httpx.get(f"{gateway.url}/ready").status_code == 200
