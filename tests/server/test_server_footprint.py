"""How many blocks a request is predicted to take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc_server.footprint import Asked, Prompt

from sgl_kvc.spec import chained_digests, parse

PAGE = 16


def prompt(length: int, answer: int, knob: dict[str, Any], *, choices: int = 1) -> Prompt:
    digests = chained_digests(range(length), None, PAGE)
    return Prompt(parse(knob), length, answer, choices, digests)


@pytest.mark.parametrize(
    ("length", "answer", "knob", "own", "shared", "prefill"),
    [
        (1000, 24, {"rate": 1}, 2, 62, 0),
        (1000, 24, {"rate": 8}, 8 + 2, 0, 63 - 2),
        (1000, 0, {"rate": 8}, 8 + 1, 0, 63 - 1),
        (40, 24, {"rate": 8}, 2, 2, 0),  # shorter than min_tokens
        (1000, 24, {"rate": 8, "prefix_tokens": 500}, 4 + 2, 31, 32 - 2),
        (1000, 24, {"rate": 8, "question_tokens": 40}, 4, 8, 63 - 4),  # stored, for others too
        (1000, 2000, {"rate": 8, "recompress_every": 64}, 24 + 5, 0, 63 + 8 - 29),
        (1000, 24, {"rate": 8, "prefill_block": 250}, 8 + 2, 0, 8 + 16 + 1 - 10),
        (100_000, 24, {"budget": 640, "prefill_block": 256}, 40 + 2, 0, 16 + 1 - 2),
        (1000, 24, {"rate": 8, "prefill_block": 160, "question_tokens": 40}, 4, 8, 8 + 11 - 12),
    ],
)
def test_blocks(
    length: int, answer: int, knob: dict[str, Any], own: int, shared: int, prefill: int
) -> None:
    found = prompt(length, answer, knob).footprint(PAGE)
    assert (found.own, sum(found.shared.values()), found.prefill) == (own, shared, prefill)


@pytest.mark.parametrize("rate", [1, 8])
def test_choices_share_their_prompt_and_no_more(rate: float) -> None:
    one, four = (prompt(1000, 24, {"rate": rate}, choices=n).footprint(PAGE) for n in (1, 4))
    assert four.own == 4 * one.own
    assert four.shared == one.shared


def test_tokens_that_are_not_known_are_not_shared() -> None:
    unknown = Prompt(parse({"rate": 1}), 1000, 24).footprint(PAGE)
    assert (unknown.own, unknown.shared) == (64, {})


@settings(deadline=None)
@given(
    length=st.integers(0, 4000), answer=st.integers(0, 500), rate=st.sampled_from([1, 1.5, 4]),
    most=st.sampled_from([4.0, 16.0, 100.0]),
    knob=st.sampled_from([{}, {"prefix_tokens": 100}, {"question_tokens": 30}]),
)  # fmt: skip
def test_a_raised_rate_takes_less(
    length: int, answer: int, rate: float, most: float, knob: dict[str, Any]
) -> None:
    asked = Asked((prompt(length, answer, {"rate": rate, **knob}),), most)
    rates = asked.raised_rates(PAGE)
    assert rates == sorted(set(rates))
    assert all(rate < each <= most for each in rates)
    sizes = [total(asked, each) for each in rates]
    assert sizes == sorted(sizes, reverse=True)
    if rate > 1 and len(sizes) > 1:
        assert sizes[0] < total(asked, None)


def total(asked: Asked, rate: float | None) -> int:
    found = asked.footprint(PAGE, rate)
    return found.own + sum(found.shared.values())
