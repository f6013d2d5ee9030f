"""Apportioners that kvpress has not, each against its paper's budgets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sgl_kvc.policy.apportioners.by_error import observe
from sgl_kvc.policy.base import scorer
from sgl_kvc.policy.selection import select
from sgl_kvc.spec import parse
from tests.sgl_kvc.contexts import pages_context
from tests.sgl_kvc.prompts import DIM, HIDDEN, prompt
from tests.sgl_kvc.test_apportioners import flat, pages
from tests.sgl_kvc.test_paper_scorers import _context

# --- Ada-PyramidKV -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("floor", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("beta", [1, 3, 20])
def test_adaptive_pyramid(seed, floor, beta):
    """PyramidKV's share of every layer, given page by page to the head with the best one next."""
    torch.manual_seed(seed)
    layers, heads, most, mean = 5, 3, 30, 8
    scores = torch.rand(layers, heads, most).sort(descending=True).values
    context = pages_context(scores, layers * heads * mean)
    shares = pages("pyramid", context, beta=beta)
    expected = []
    for layer, (share, *_) in enumerate(shares):
        counts = [max(1, math.ceil(floor * share - 1e-9))] * heads
        while sum(counts) < heads * share:
            best = max(range(heads), key=lambda h: scores[layer, h, counts[h]])
            counts[best] += 1
        expected.append(counts)
    assert pages("adaptive-pyramid", context, beta=beta, floor=floor) == expected


# --- WindowKV ----------------------------------------------------------------------------------


def test_stepped_pyramid_falls_from_group_to_group():
    """As its authors' code: the last group `step / 14` of the mean, the first what that leaves."""
    mean, step, beta = 140, 4, 14
    got = [row[0] for row in pages("stepped-pyramid", flat(16, 2, 999, mean), step=4,
                                   last_share=step / beta)]  # fmt: skip
    last = mean * step // beta
    first = 2 * mean - last
    steps = (first - last) / 3
    for layer, one in enumerate(got):
        assert abs(one - (first - layer // 4 * steps)) <= 1
    assert got == sorted(got, reverse=True)
    uneven = pages("stepped-pyramid", flat(5, 2, 99, 10), step=3, last_share=0.5)
    assert uneven == [[14, 14]] * 3 + [[4, 4]] * 2, "15 and 5, as far as the total holds"
    assert pages("stepped-pyramid", flat(3, 2, 99, 7), step=8) == [[7, 7]] * 3, "one group"


# --- CompressKV --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 3, 2), (33, 1, 4), (57, 4, 1)])
@pytest.mark.parametrize("kept", [4, 16, 99])
def test_by_error_observes_what_is_lost_of_the_output(shape, kept):
    """|O' - O| / |O| over the window's queries, head by head through the output projection."""
    p, window, (n, heads, group) = prompt(*shape), 5, shape
    context = replace(
        _context(p, parse({"rate": 4, "policy": "compresskv", "window": window})),
        kept=kept, scores=torch.rand(heads, n),
    )  # fmt: skip
    projection = p.facts.output_projection[p.layer].double().view(HIDDEN, heads, group, DIM)
    lost = whole = 0.0
    for i in range(window):
        output, compressed = torch.zeros(HIDDEN).double(), torch.zeros(HIDDEN).double()
        for head in range(heads):
            best = set(context.scores[head].topk(min(kept, n)).indices.tolist())
            best |= set(range(n - window, n))
            for g in range(group):
                row = p.attention(window)[head, g, i]
                values = p.values[:, head].double()
                output += projection[:, head, g] @ (row @ values)
                row = torch.tensor([row[j] if j in best else 0.0 for j in range(n)]).double()
                compressed += projection[:, head, g] @ (row / row.sum() @ values)
        lost += float((compressed - output).square().sum())
        whole += float(output.square().sum())
    expected = math.sqrt(lost) / (math.sqrt(whole) + 1e-5)
    assert observe(context, limit=3.0).tolist() == pytest.approx([expected], rel=1e-4, abs=1e-6)


def test_by_error_gives_in_proportion_up_to_a_limit():
    errors = torch.tensor([[0.2], [0.1], [0.5], [0.0]])
    scores = torch.zeros(4, 2, 50)
    scores[..., :1] = 1e30
    context = pages_context(scores, 11 * 8, errors)
    assert [row[0] for row in pages("by-error", context)] == [1 + 10, 1 + 5, 1 + 25, 1]
    limited = [row[0] for row in pages("by-error", context, limit=2.0)]
    assert limited == [1 + 13, 1 + 6, 22, 1], "19 for 2 to 1"


# --- Layer-DefensiveKV -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_layer_defensivekv_keeps_the_best_of_all_layers(seed):
    """One ranking of all keys by the worst case, but the recent ones and each head's best."""
    knob = {"policy": "layer-defensivekv", "window": 5, "sinks": 0, "recent": 5, "first_stage": 0.0}
    spec = parse(knob | {"budget": 20})
    scores = []
    for layer in range(2):
        p = prompt(40 + seed)
        p.layer, p.kept = layer, 20
        p.keys, p.values = p.keys * (1 + layer), p.values * (3 - 2 * layer)
        scores.append(scorer(spec).run(_context(p, spec)))
    flat_scores = torch.stack(scores).flatten(0, 1)
    n = flat_scores.shape[1]
    chosen = select(torch.stack(scores), spec, 20, 1)
    got = [set(part.tolist()) for part in chosen.positions.split(chosen.pages.tolist())]
    kept = [set(range(n - 5, n)) for _ in range(len(got))]
    order = [(head, key) for head in range(len(got)) for key in range(n - 5)]
    order.sort(key=lambda at: -flat_scores[at])
    for head, key in order[: 20 * len(got) - 5 * len(got)]:
        kept[head].add(key)
    assert got == kept
    assert len({len(each) for each in got}) > 1
