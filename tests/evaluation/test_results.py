"""Scores and intervals of the cells."""

from __future__ import annotations

import pytest
from kvc_eval.results import interval, summarise

from tests.evaluation.records import GRID, failure, record


def test_intervals() -> None:
    assert interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson
    assert interval([1.0] * 10) == pytest.approx((0.7225, 1), abs=1e-4)
    # mean 0.5, standard deviation 0.1: 0.5 ± 1.96 · 0.1 / 2
    scores = [0.4, 0.6, 0.5 - 0.1 / 2**0.5, 0.5 + 0.1 / 2**0.5]
    assert interval(scores) == pytest.approx((0.4020, 0.5980), abs=1e-4)


def test_a_summary_counts_what_was_answered() -> None:
    records = [
        record(), record(sample=1, score=0.0, after=40), failure(2),
        record(sample=3, after=100, skipped="too short"), record("off", 1, after=100),
    ]  # fmt: skip
    off, cell = summarise(records, GRID)
    assert off["policy"] == "off"
    assert (cell["n"], cell["failed"], cell["skipped"]) == (3, 1, 1)
    assert cell["score"] == pytest.approx(2 / 3, abs=1e-5)
    assert cell["kept"] == pytest.approx(160 / 300, abs=1e-3)
    assert cell["tasks"]["votes"] == {"n": 2, "score": 0.5, "interval": [0.09453, 0.90547]}
