"""From scores to what is kept: what is protected, and what apportioners are told."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.select import protect

from sgl_kvc.policy import selection
from sgl_kvc.policy.base import Method, forced_recent
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.pages import PagesContext
from sgl_kvc.policy.selection import select
from sgl_kvc.spec import parse

INF = torch.inf


def uniform(**knob):
    """Scores as they are given, pages alike for all heads."""
    given = {"rate": 4, "scorer": "random", "apportioner": "uniform", "sinks": 0, "recent": 0}
    return parse(given | knob)


@pytest.mark.parametrize(
    ("recent", "kept", "forced"),
    [(32, 64, 16), (8, 64, 8), (16, 64, 16), (17, 64, 16), (32, 7, 1), (32, 3, 0), (0, 64, 0)],
)
def test_recent_keys_take_at_most_a_quarter(recent, kept, forced):
    assert forced_recent(recent, kept) == forced


def test_the_quarter_holds_in_selection():
    """At high rates the recent would fill the budget, and all heads would keep the same."""
    scores = torch.zeros(1, 1, 64)
    scores[..., 8:24] = 1
    chosen = select(scores, uniform(recent=64), 4, 4)
    assert chosen.positions.tolist() == [*range(8, 20), *range(60, 64)]


def test_what_scores_best_is_kept_by_pages():
    scores = torch.zeros(2, 2, 32)
    wanted = {(0, 0): [3, 4, 5, 30], (0, 1): [0, 1, 2, 31], (1, 0): [9, 11, 13, 15],
              (1, 1): [28, 29, 30, 31]}  # fmt: skip
    for (layer, head), positions in wanted.items():
        scores[layer, head, positions] = torch.arange(1.0, 5)
    chosen = select(scores, uniform(), 1, 4)
    assert chosen.pages.tolist() == [1] * 4
    assert chosen.positions.view(4, 4).tolist() == list(wanted.values())


def test_sinks_and_recent_keys_outlive_all_others():
    scores = torch.full((1, 1, 64), 5.0)
    scores[..., 30] = 1e6
    chosen = select(scores, uniform(sinks=3, recent=4), 4, 4)
    kept = chosen.positions.tolist()
    assert kept[:3] == [0, 1, 2]
    assert kept[-4:] == [60, 61, 62, 63]
    assert 30 in kept
    assert len(kept) == 16


@pytest.mark.parametrize(("before", "sinks"), [(0, 6), (2, 4), (6, 0), (50, 0)])
def test_sinks_before_what_is_compressed_count(before, sinks):
    """A shared prefix holds the first of them already."""
    scores = torch.zeros(1, 1, 64)
    scores[..., 32:] = 1
    kept = select(scores, uniform(sinks=6), 2, 4, before=before).positions.tolist()
    assert [each for each in kept if each < 32] == list(range(sinks))


@pytest.mark.parametrize(("tail", "recent"), [(0, 4), (1, 3), (4, 0), (9, 0)])
def test_recent_keys_behind_what_is_compressed_count(tail, recent):
    scores = torch.zeros(1, 1, 64)
    scores[..., :32] = 1
    kept = select(scores, uniform(recent=4), 4, 4, tail=tail).positions.tolist()
    assert [each for each in kept if each >= 32] == list(range(64 - recent, 64))


def test_heads_that_begin_later():
    """Compressing again, heads hold different numbers; each has its own sinks."""
    scores, first = torch.zeros(1, 2, 32), torch.tensor([0, 12])
    scores[:, 1, :12] = -INF
    chosen = select(scores, uniform(sinks=2, recent=2), 2, 4, first=first)
    one, two = chosen.positions.view(2, 8).tolist()
    assert {0, 1, 30, 31} <= set(one)
    assert {12, 13, 30, 31} <= set(two)
    assert min(two) >= 12


def test_protection_of_heads_that_begin_later():
    scores, first = torch.full((1, 3, 8), 5.0), torch.tensor([0, 4, 7])
    for head, begin in enumerate(first.tolist()):
        scores[0, head, :begin] = -INF
    protect(scores, 2, 3, first)
    for head, begin in enumerate(first.tolist()):
        row = scores[0, head]
        assert torch.isneginf(row[:begin]).all()
        order = row.argsort(descending=True, stable=True).tolist()
        held = list(range(begin, 8))
        recent = [each for each in (7, 6, 5) if each in held[2:]]
        assert order[: len(held[:2] + recent)] == held[:2] + recent
        others = [each for each in held[2:] if each not in recent]
        assert row[others].tolist() == [5.0] * len(others)
    same, plain = torch.full((1, 1, 8), 5.0), torch.full((1, 1, 8), 5.0)
    protect(same, 2, 3, torch.tensor([0]))
    protect(plain, 2, 3)
    assert torch.equal(same, plain)


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (9, 0), (0, 9), (0, -3), (9, 9)])
@pytest.mark.parametrize("first", [None, torch.tensor([0])])
def test_protection_at_the_edges(sinks, recent, first):
    scores = torch.full((1, 1, 5), 5.0)
    protect(scores, sinks, recent, first)
    order = scores[0, 0].argsort(descending=True, stable=True).tolist()
    if sinks:
        assert order == [0, 1, 2, 3, 4]
    elif recent > 0:
        assert order == [4, 3, 2, 1, 0]
    else:
        assert (scores == 5).all()
    lifted = (scores >= 1e29).all() if sinks > 4 or recent > 4 else (scores < 1e29).all()
    assert lifted


@pytest.mark.parametrize("first", [None, torch.tensor([0])])
def test_sinks_outlive_recent_keys_and_newer_keys_older_ones(first):
    scores = torch.full((1, 1, 8), 5.0)
    protect(scores, 4, 4, first)
    order = scores[0, 0].argsort(descending=True, stable=True).tolist()
    assert order == [0, 1, 2, 3, 7, 6, 5, 4]


def test_the_first_key_of_a_head_may_be_a_recent_one():
    scores, first = torch.full((1, 3, 8), 5.0), torch.tensor([4, 6, 7])
    protect(scores, 0, 3, first)
    assert [(row >= 1e29).nonzero().flatten().tolist() for row in scores[0]] == [
        [5, 6, 7], [6, 7], [7]
    ]  # fmt: skip


def test_what_methods_are_told(monkeypatch):
    lifted, told = [], []

    def apportion(context: PagesContext) -> torch.Tensor:
        told.append(context)
        return torch.full((2, 3), 2)

    def lift(scores: torch.Tensor, kept: int, tail: int) -> None:
        lifted.append((kept, tail))
        scores[..., 17] = 9

    monkeypatch.setattr(selection, "scorer", lambda spec: Method(None, None, lift))
    monkeypatch.setattr(selection, "apportioner", lambda spec: Method(apportion, None, None))
    scores, statistics, facts = torch.rand(2, 3, 32), torch.rand(2, 4), ModelFacts(neox=False)
    chosen = select(scores, uniform(), 2, 4, tail=3, statistics=statistics, facts=facts)
    assert lifted == [(8, 3)]
    (context,) = told
    assert context.page_scores.shape == (2, 3, 8)
    assert (context.page_scores[..., 0] == 9).all()
    assert (context.page_scores.diff() <= 0).all()
    assert (context.total, context.ranked.page_size) == (12, 4)
    assert (context.layers, context.heads, context.pages, context.mean) == (2, 3, 8, 2)
    assert context.statistics is statistics
    assert context.facts is facts
    assert (chosen.positions.view(6, 8) == 17).any(-1).all()
    select(torch.rand(2, 3, 32), uniform(), 2, 4)
    assert told[1].statistics is None
    assert told[1].facts == ModelFacts()
