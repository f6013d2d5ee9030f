"""Scorers that kvpress has not, each against its paper's formulas, key by key."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sgl_kvc.policy.base import HeldContext, LayerContext, scorer
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.spec import parse
from tests.sgl_kvc.prompts import DIM, Prompt, close, prompt, ranking, score

#: (tokens, KV heads, query heads that share one); the tokens are the seed, too.
SHAPES = [(40, 3, 2), (33, 1, 4), (57, 4, 1)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=["gqa", "mqa", "mha"])


def _context(p: Prompt, spec) -> LayerContext:
    return LayerContext(
        p.layer, 2, p.queries[-spec.window :], PromptKVs.of(p.keys, p.values), p.scale, spec,
        p.tokens, p.kept, p.facts,
    )  # fmt: skip


def _pooled(row: list[float], width: int) -> list[float]:
    half = width // 2
    return [max(row[max(0, i - half) : i + half + 1]) for i in range(len(row))]


def _softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


# --- R-KV --------------------------------------------------------------------------------------


def _redundancy(keys: torch.Tensor, threshold: float) -> list[float]:
    """Of keys [n, D]: mean similarity, but to those whose last similar key this one is."""
    n = len(keys)
    similar = [
        [0.0 if i == j else float(torch.cosine_similarity(a, b, dim=0)) for j, b in enumerate(keys)]
        for i, a in enumerate(keys)
    ]
    for row in similar:
        last = max((j for j in range(n) if row[j] > threshold), default=None)
        if last is not None:
            row[last] = 0.0
    return _softmax([sum(row[j] for row in similar) / n for j in range(n)])


@shapes
@pytest.mark.parametrize("importance", [0.1, 0.6])
def test_r_kv(shape, importance):
    p, window = prompt(*shape), 5
    n, heads, group = shape
    before, expected = n - window, torch.zeros(heads, n)
    queries = p.queries.double().view(n, heads, group, DIM)
    for head in range(heads):
        keys, paid = p.keys[:, head].double(), [0.0] * before
        for i in range(before, n):
            logits = [
                max(float(queries[i, head, g] @ keys[j]) * p.scale for g in range(group))
                for j in range(before)
            ]
            paid = [a + b / window for a, b in zip(paid, _softmax(logits), strict=True)]
        own = p.attention(window)[head, :, :, before:].mean(dim=(0, 1)).tolist()
        rows = zip(_pooled(paid, 3) + own, _redundancy(keys, 0.4), strict=True)
        expected[head] = torch.tensor([importance * a - (1 - importance) * r for a, r in rows])
    got = score(p, "r-kv", window=window, pool=3, importance=importance, threshold=0.4)
    close(got, expected)


def test_r_kv_keeps_the_newest_of_keys_that_repeat_each_other():
    """Five alike among others: the last is as good as one that nothing resembles."""
    p = prompt(30, 1, 1)
    p.keys = torch.zeros(30, 1, 30)
    p.keys[:, 0] = torch.eye(30)
    p.keys[[3, 8, 11, 17, 20]] = p.keys[3].clone()
    p.queries = torch.zeros(30, 1, 30)
    order = ranking(score(p, "r-kv", window=4)[0])
    assert set(order[-4:]) == {3, 8, 11, 17}
    assert 20 not in order[-5:-4] or order.index(20) < 26


@pytest.mark.parametrize("held", [[12, 12], [12, 7], [3, 12]])
def test_r_kv_in_decode(held):
    """By what decode paid and the keys that are held; heads hold different numbers."""
    torch.manual_seed(sum(held))
    n, spec = 12, parse({"rate": 4, "policy": "r-kv", "pool": 3, "threshold": 0.2})
    keys, paid = torch.randn(2, n, DIM), torch.rand(2, n)
    there = torch.stack([torch.arange(n) >= n - number for number in held])
    got = scorer(spec).rescore(HeldContext(keys, there, paid, 99, spec))
    assert torch.isfinite(got).all()
    for head, number in enumerate(held):
        mine = paid[head, n - number :].double()
        attention = _pooled((mine / mine.sum()).tolist(), 3)
        redundancy = _redundancy(keys[head, n - number :].double(), 0.2)
        expected = [0.1 * a - 0.9 * r for a, r in zip(attention, redundancy, strict=True)]
        close(got[head, n - number :], torch.tensor(expected))


# --- CompressKV --------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("retrieving", [1, 2, 9])
def test_compress_kv(shape, retrieving):
    p, window, n = prompt(*shape), 5, shape[0]
    profile = p.facts.head_profile[p.layer].tolist()
    best = sorted(range(shape[1]), key=lambda head: -profile[head])[:retrieving]
    expected = torch.zeros(n).double()
    for head in best:
        for row in p.attention(window)[head].mean(dim=1):
            for i in range(n - window):
                around = row[max(0, i - 1) : min(n - window, i + 2)]
                expected[i] += around.sum() / 3 / shape[2] / len(best)
            expected[n - window :] += row[n - window :] / shape[2] / len(best)
    for row in score(p, "compress-kv", window=window, pool=3, retrieving=retrieving):
        close(row, expected)


# --- WindowKV ----------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize(("best", "counted"), [(1.0, 6), (0.5, 3), (0.0, 1)])
def test_window_kv(shape, best, counted):
    p, window, run, n = prompt(*shape), 5, 6, shape[0]
    before, paid = n - window, p.attention(window).sum(dim=2).flatten(0, 1)
    expected = torch.zeros(n).double()
    for begin in range(0, before, run):
        part = paid[:, begin : min(begin + run, before)]
        mean = sum(torch.stack(sorted(row, reverse=True)[:counted]).mean() for row in part)
        expected[begin : begin + part.shape[1]] = mean / len(part)
    for row in score(p, "window-kv", window=window, run=run, best=best):
        close(row[:before], expected[:before])
        assert (row[-(p.kept // 4) :] >= 1e8).all()


def test_window_kv_chooses_once_for_a_group_of_layers():
    spec = parse({"rate": 4, "policy": "windowkv", "sharing": 3})
    run, chosen = scorer(spec).run, []
    for layer in range(7):
        p = prompt(40 + layer)
        context = dataclasses.replace(_context(p, spec), layer=layer)
        previous = chosen[-1] if chosen else None
        chosen.append(run(dataclasses.replace(context, previous=previous)))
    assert [layer for layer in range(1, 7) if chosen[layer] is not chosen[layer - 1]] == [3, 6]


# --- KVCrush -----------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("anchor", ["alternate", "zeros", "ones"])
@pytest.mark.parametrize("kept", [12, 20])
def test_kv_crush(shape, anchor, kept):
    p, window, (n, heads, _) = prompt(*shape), 5, shape
    p.kept = kept
    paid = p.attention(window).sum(dim=(1, 2)) / (window * shape[2])
    bits = {"alternate": [h % 2 for h in range(heads)], "zeros": [0] * heads, "ones": [1] * heads}
    halves = [set(ranking(row)[: n // 2]) for row in paid]
    distance = [
        sum((key in halves[head]) != bool(bits[anchor][head]) for head in range(heads))
        for key in range(n)
    ]
    got = score(p, "kv-crush", window=window, anchor=anchor)
    for head in range(heads):
        own = list(range(n - kept // 4, n))
        important = own + [key for key in ranking(paid[head]) if key not in own]
        important = important[: kept - kept // 4]
        others = sorted((k for k in range(n) if k not in important), key=lambda k: distance[k])
        stand = [others[i * (len(others) - 1) // (kept // 4 - 1)] for i in range(kept // 4)]
        chosen = (got[head] >= 1e8).nonzero().flatten().tolist()
        assert chosen == sorted({*important, *stand})
        assert len(chosen) == kept
        rest = [key for key in range(n) if key not in chosen]
        close(got[head, rest], paid[head, rest])


# --- LaCache -----------------------------------------------------------------------------------


def _ladder(n: int, kept: int, sinks: int, layer: int, period: int, rung: int) -> list[int]:
    """What is left, a period at a time from the oldest, until it is few enough."""
    left = list(range(n))
    at = sinks
    while len(left) > kept:
        if at + period > len(left):
            if at == sinks:
                break
            at = sinks
            continue
        begin = at + layer % (period - rung + 1)
        left[at : at + period] = left[begin : begin + rung]
        at += rung
    return left


@pytest.mark.parametrize(
    ("layers", "span", "overlap", "period", "rung"),
    [(32, 0.5, 0.0, 2, 1), (32, 0.25, 0.0, 4, 1), (32, 0.25, 0.5, 7, 2), (6, 0.5, 0.34, 3, 2)],
)
@pytest.mark.parametrize("kept", [200, 61, 20])
def test_la_cache(layers, span, overlap, period, rung, kept):
    """`period` and `rung` are the authors': 1 + (L - S) / (S - O) and S / (S - O), rounded up."""
    p, n = prompt(250, 2, 1), 250
    spec = parse({"rate": 4, "policy": "lacache", "span": span, "overlap": overlap, "sinks": 3})
    seen = set()
    for layer in range(layers):
        context = dataclasses.replace(_context(p, spec), layer=layer, layers=layers, kept=kept)
        expected = _ladder(n, kept, 3, layer, period, rung)
        assert len(expected) <= kept
        for row in scorer(spec).run(context):
            order = ranking(row)
            assert order[: len(expected)] == expected[::-1]
            assert order[len(expected) :] == [k for k in range(n)[::-1] if k not in expected]
        seen |= set(expected)
    assert len(seen) > 1.5 * kept or kept == 200, "layers keep different positions"


# --- TriAttention ------------------------------------------------------------------------------


def _pairs(states: torch.Tensor, neox: bool) -> torch.Tensor:
    """[..., D] as complex numbers [..., D / 2], as they are rotated together."""
    if neox:
        return torch.complex(*states.double().chunk(2, dim=-1))
    return torch.view_as_complex(states.double().unflatten(-1, (-1, 2)).contiguous())


def _series(
    before: torch.Tensor, keys: torch.Tensor, positions: list[int], now: int, most: int
) -> torch.Tensor:
    """The paper's score of complex, unrotated keys for queries like `before`: [H*G, n]."""
    turn = 1e4 ** -(torch.arange(0, DIM, 2) / DIM).double()
    group = before.shape[1] // keys.shape[1]
    distances = [2**i for i in range(20) if 2**i <= most]
    scores = torch.zeros(before.shape[1], len(positions)).double()
    for head in range(before.shape[1]):
        mean, length = before[:, head].mean(dim=0), before[:, head].abs().mean(dim=0)
        for j, position in enumerate(positions):
            key = keys[j, head // group]
            phase = (mean * key.conj()).angle()
            for further in distances:
                angle = turn * (now - position + further) + phase
                scores[head, j] += (mean.abs() * key.abs() * angle.cos()).sum() / len(distances)
            scores[head, j] += ((length - mean.abs()) * key.abs()).sum()
    scores -= scores.mean(dim=1, keepdim=True)
    return scores / scores.std(dim=1, correction=0, keepdim=True)


@shapes
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("size", [1.0, 1.3])
def test_tri_attention(shape, neox, size):
    """In the prompt, and of the keys that are left in decode; `size`: a rotation that scales."""
    n, heads, group = shape
    p = prompt(*shape, neox=neox)
    table = p.facts.cos_sin
    p.facts = dataclasses.replace(p.facts, cos_sin=table * size)
    turned = torch.complex(*table.double().chunk(2, dim=-1))
    before = _pairs(p.queries, neox) / turned[:n, None] / size
    keys = _pairs(p.keys, neox) / turned[:n, None] / size
    expected = _series(before, keys, list(range(n)), n, 300)
    got = score(p, "tri-attention", chunk=11, furthest=300)
    close(got, expected.view(heads, group, n).amax(dim=1), rtol=1e-3)

    spec = parse({"rate": 4, "policy": "triattention", "furthest": 300})
    state = scorer(spec).observe(dataclasses.replace(_context(p, spec), queries=p.queries))
    left = [2, 3, 5, 11, 20]
    there = torch.arange(8).ge(3).expand(heads, 8)
    held = torch.randn(heads, 8, DIM)
    held[:, 3:] = p.keys[left].transpose(0, 1)
    context = HeldContext(held, there, torch.zeros(heads, 8), 90, spec, p.facts, state)
    expected = _series(before, keys[left], left, 90, 300)
    close(scorer(spec).rescore(context)[:, 3:], expected.view(heads, group, 5).amax(1), rtol=1e-3)


def test_tri_attention_without_a_prompt_that_was_scored_keeps_the_newest():
    spec = parse({"rate": 4, "policy": "triattention"})
    there = torch.ones(2, 6, dtype=torch.bool)
    context = HeldContext(torch.randn(2, 6, DIM), there, torch.zeros(2, 6), 9, spec)
    for row in scorer(spec).rescore(context):
        assert ranking(row) == [5, 4, 3, 2, 1, 0]
