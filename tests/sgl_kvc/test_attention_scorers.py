"""Scorers that read attention itself, against dense attention or known right keys."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sgl_kvc.policy.base import LayerContext, scorer
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.scorers.keyformer import _gumbel
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.spec import Extent, parse
from tests.sgl_kvc.prompts import DIM, HIDDEN, close, lifted, prompt, ranking, score

# --- the last queries' attention ---------------------------------------------------------------


@pytest.mark.parametrize(("norm", "power"), [("l1", 1), ("l2", 2)])
@pytest.mark.parametrize("group", ["sum", "mean"])
def test_attention_window(norm, power, group):
    p, window = prompt(), 5
    attention = p.attention(window)
    if group == "mean":
        attention = attention.mean(dim=1, keepdim=True)
    raw = (attention**power).sum(dim=(1, 2))
    expected = raw.clone()
    for i in range(35):  # the window's own keys are left as they are
        expected[:, i] = raw[:, max(0, i - 1) : min(35, i + 2)].amax(-1)
    got = score(p, "attention-window", window=window, pool=3, norm=norm, group=group)
    close(got, expected)


def test_attention_fades_to_neighbours_over_the_windows_edge():
    """Key 31 is the last before a window of 8; two keys on, either way, half of it counts."""
    p = prompt(40, 1, 1)
    p.queries, p.keys = torch.zeros(40, 1, DIM), torch.zeros(40, 1, DIM)
    p.queries[..., 0], p.keys[31, 0, 0] = 30.0, 1.0
    got = score(p, "attention-window", window=8, pool=1, half_life=2.0)[0]
    plain = score(p, "attention-window", window=8, pool=1)[0]
    assert plain[[30, 32]].max() < 1e-3 * plain[31]
    close(got[[27, 29, 33, 35]] / plain[31], torch.tensor([0.25, 0.5, 0.5, 0.25]))
    assert (got >= plain).all()


def test_scores_fade_further_in_heads_that_retrieve():
    """Two keys on, half counts; where the half-life is 1.5 times as long, 2 ** (-2 / 3)."""
    p = prompt(40, 4, 1)
    p.queries, p.keys = torch.zeros(40, 4, DIM), torch.zeros(40, 4, DIM)
    p.queries[..., 0], p.keys[20, :, 0] = 30.0, 1.0
    knob = {"window": 8, "pool": 1, "half_life": 2.0, "profile_reach": 1.5}

    def after_two(profile: torch.Tensor | None) -> torch.Tensor:
        p.facts = dataclasses.replace(p.facts, head_profile=profile)
        got = score(p, "attention-window", **knob)
        return got[:, 22] / got[:, 20]

    def alone(head: int) -> torch.Tensor:
        """As a chat's next turn scores it: `HeldScores`."""
        spec = parse({"rate": 4, "scorer": "attention-window", "apportioner": "uniform"} | knob)
        context = LayerContext(
            layer=1, layers=2, queries=p.queries[-8:, head : head + 1],
            kvs=PromptKVs.of(p.keys[:, head : head + 1], p.values[:, head : head + 1]),
            scale=p.scale, spec=spec, tokens=torch.arange(40), kept=10, facts=p.facts, head=head,
        )  # fmt: skip
        got = scorer(spec).run(context)[0]
        return got[22] / got[20]

    first = torch.zeros(1, 4)
    profile = torch.cat((first, torch.tensor([[0.1, 0.25, 0.2, 0.9]])))  # on average 0.18125
    longer = torch.tensor([1 / 1.5, 0.25 / 0.18125, 0.2 / 0.18125, 1.5])
    close(after_two(profile), 0.5 ** (1 / longer))
    close(torch.stack([alone(head) for head in range(4)]), 0.5 ** (1 / longer))
    close(after_two(None), torch.full((4,), 0.5))


@pytest.mark.parametrize("policy", ["kv-compress", "h2o"])
def test_keys_that_get_all_of_a_query_tie_whatever_prefill_rounds(policy):
    """A cached prefix changes the last bits of prefill's log-sum-exp; kept keys must not follow."""
    p, spec = prompt(64, 2, 1), parse({"rate": 4, "policy": policy})
    p.queries[:], p.keys[:] = 0.0, 0.0
    for i in range(64):  # every token attends to one earlier key alone
        p.queries[i, :, i % DIM] = p.keys[i, :, i % DIM] = 30.0
        p.keys[: max(0, i - DIM), :, i % DIM] = 0.0
    logits = p.queries[:, 0] @ p.keys[:, 0].T * p.scale
    lse = logits.masked_fill(torch.ones(64, 64).triu(1).bool(), float("-inf")).logsumexp(-1)
    chosen = []
    for noise in (0.0, 3e-5):
        rounded = lse[:, None].repeat(1, 2) + noise * torch.randn(64, 2)
        scores = PromptScores(spec, Extent.of(spec, 64, 16), [1] * 64, 16, 1)
        scores.observe(0, p.queries, PromptKVs.of(p.keys, p.values), p.scale, rounded)
        chosen.append(scores.scores())
    assert chosen[0].equal(chosen[1])


def test_tova():
    p = prompt()
    expected = p.attention(1).mean(dim=(0, 1, 2))
    for row in score(p, "tova"):
        close(row, expected)


def test_scissorhands():
    p, window, n = prompt(), 7, 40
    attention = p.attention(window)
    expected = torch.zeros(3, n)
    for i, position in enumerate(range(n - window, n)):
        for key in range(position + 1):
            low = attention[:, :, i, key] < 1 / (position + 1)
            expected[:, key] -= low.sum(dim=1)
    got = score(p, "scissorhands", window=window)
    assert torch.equal(got.floor(), expected), "counts"
    ties = attention.mean(dim=(1, 2))
    for row in range(3):
        pairs = zip(expected[row].tolist(), ties[row].tolist(), strict=True)
        order = sorted(range(n), key=lambda key, of=list(pairs): of[key], reverse=True)
        assert ranking(got[row]) == order


@pytest.mark.parametrize(("kept", "forced"), [(36, 9), (10, 2)])
def test_cake(kept, forced):
    p, window = prompt(), 9
    p.kept = kept
    attention = p.attention(window)
    raw = attention.mean(dim=2) + 50 * attention.var(dim=2)
    padded = torch.nn.functional.pad(raw[..., :-window], (1, 1))
    pooled = (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3
    expected = torch.cat([pooled, raw[..., -window:]], dim=-1).mean(dim=1)
    got = score(p, "cake", window=window, gamma=50.0, pool=3)
    close(got[:, :-forced], expected[:, :-forced])
    assert got[:, -forced:].min() > got[:, :-forced].max()


def test_cake_prefers_the_key_that_comes_and_goes():
    """Every query gives key 1 half of its attention, the rest to key 2 and 3 in turns."""
    p = prompt(12, 1, 1)
    p.keys, p.queries = torch.zeros(12, 1, DIM), torch.zeros(12, 1, DIM)
    p.keys[1:4, 0, :3] = torch.eye(3)
    p.queries[:, 0, 0] = p.queries[::2, 0, 1] = p.queries[1::2, 0, 2] = 60.0
    mean = p.attention(8).mean(dim=(0, 1, 2))
    assert mean[1:4].tolist() == pytest.approx([0.5, 0.25, 0.25], abs=1e-3)
    assert ranking(score(p, "cake", window=8, pool=1, gamma=0.0)[0, :4])[0] == 1
    assert ranking(score(p, "cake", window=8, pool=1)[0, :4])[:2] in ([2, 3], [3, 2])


@pytest.mark.parametrize(("kept", "forced"), [(20, 5), (10, 2)])
def test_critical(kept, forced):
    """Half of what is kept by attention alone, the rest by attention times the norm."""
    p, window, n = prompt(), 5, 40
    p.kept = kept
    attention = p.attention(window).mean(dim=(1, 2))
    projection = p.facts.output_projection[p.layer].double().view(HIDDEN, 3, 2, DIM)
    moved = torch.einsum("khd,ohgd->hgko", p.values.double(), projection)
    weighted = (attention + 1e-4) * moved.abs().sum(-1).mean(1)
    got = score(p, "critical", window=window, pool=1)
    for head in range(3):
        own = list(range(n - forced, n))
        rest = [key for key in ranking(attention[head]) if key not in own]
        first = [*own, *rest[: kept // 2 - forced]]
        second = [key for key in ranking(weighted[head]) if key not in first]
        order = ranking(got[head])
        assert set(order[: len(first)]) == set(first)
        assert order[len(first) :] == second


@pytest.mark.parametrize(("kept", "forced"), [(20, 5), (12, 3)])
def test_defensive(kept, forced):
    p, window = prompt(), 5
    p.kept = kept
    attention = p.attention(window)
    before = attention[..., :-window]
    padded = torch.nn.functional.pad(before, (1, 1))
    pooled = padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]
    pooled *= before.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True)
    own = attention[..., -window : 40 - forced]
    worst = torch.cat([pooled, own], dim=-1).amax(dim=(1, 2))
    risk = worst.maximum(worst.mean(-1, keepdim=True))
    projection = p.facts.output_projection[p.layer].double().view(HIDDEN, 3, 2, DIM)
    norm = torch.einsum("khd,ohgd->hgko", p.values.double(), projection).abs().sum(-1).mean(1)
    expected = risk * (norm / norm.sum(0))[:, :-forced]
    mean = attention[..., :-forced].mean(dim=(1, 2))
    got = score(p, "defensive", window=window, pool=3, first_stage=0.6)
    for head in range(3):
        held, first = 1 - mean[head].sum(), []
        for key in ranking(mean[head])[: kept - forced]:
            if held >= 0.6:
                break
            first.append(key)
            held += mean[head, key]
        assert first
        chosen = got[head, :-forced] >= 1e8
        assert set(chosen.nonzero().flatten().tolist()) == set(first)
        close(got[head, :-forced][~chosen], expected[head][~chosen])
        assert (got[head, -forced:] >= 1e8).all()


def test_defensive_keeps_what_one_query_needs():
    """One query of eight wants key 3 alone; all of them look at key 5 a little."""
    p = prompt(20, 1, 1)
    p.keys, p.queries = torch.zeros(20, 1, DIM), torch.zeros(20, 1, DIM)
    p.values = torch.ones_like(p.values)
    p.keys[3, 0, 0], p.keys[5, 0, 1] = 1, 1
    p.queries[15, 0, 0] = 30.0
    p.queries[:, 0, 1] = 8.0
    assert ranking(p.attention(8).mean(dim=(0, 1, 2))[:12])[0] == 5
    got = score(p, "defensive", window=8, pool=1, first_stage=0.0)
    assert ranking(got[0, :12])[0] == 3


# --- every query's attention -------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "power"), [("l1", 1), ("l2", 2)])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("excluded", [0, 3])
def test_full_attention(norm, power, average, excluded):
    p, n = prompt(), 40
    near = torch.ones(n, n).triu(1 - excluded).bool()
    expected = p.attention().masked_fill(near, 0).pow(power).sum(dim=(1, 2))
    if average:
        expected /= torch.tensor([max(1, n - key - excluded) for key in range(n)])
    got = score(p, "full-attention", norm=norm, average=average, excluded=excluded)
    close(got, expected)


@pytest.mark.parametrize(("behind", "newest"), [(0, 5), (2, 3), (9, 0)])
def test_recent_share_of_the_budget(behind, newest):
    """Half of 10 keys; those behind what is selected from count and are kept anyway."""
    p = prompt()
    plain = score(p, "full-attention", norm="l1", recent_share=0.5)
    assert plain.max() < 1e8, "what attention in decode is added to is not lifted"
    got = lifted(plain, 10, "full-attention", behind, norm="l1", recent_share=0.5)
    for before, after in zip(plain, got, strict=True):
        assert set(ranking(after)[:newest]) == set(range(40 - newest, 40))
        assert ranking(after)[newest:] == [key for key in ranking(before) if key < 40 - newest]


def test_recent_share_lifts_no_key_that_a_head_has_not():
    """In decode a head's keys stand at the end of a rectangle, -inf before them."""
    scores = torch.tensor([[-torch.inf] * 3 + [0.5], [0.1, 0.4, 0.3, 0.2]])
    got = lifted(scores, 6, "full-attention", recent_share=0.5)
    assert got[0, :3].tolist() == [-torch.inf] * 3
    assert got[0, 3] >= 1e8
    assert ranking(got[1]) == [1, 2, 3, 0]
    assert got[1, 0] == scores[1, 0]


def test_keyformer():
    p, n = prompt(), 40
    logits = p.attention().log()
    noise = _gumbel(logits.float(), 0, p.layer, seed=3)
    expected = ((logits + noise) / 2).softmax(dim=-1).sum(dim=(1, 2))
    got = score(p, "keyformer", temperature=2.0, seed=3, recent_share=0.0)
    close(got, expected)
    recent = lifted(score(p, "keyformer"), p.kept, "keyformer")
    assert all(set(ranking(row)[:3]) == set(range(n - 3, n)) for row in recent)


def test_keyformer_noise_is_gumbel_and_all_different():
    like = torch.zeros(4, 2, 50, 100)
    noise = _gumbel(like, 0, 0, seed=0)
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.05)
    flat = noise.flatten(0, 1)
    assert torch.corrcoef(flat.flatten(1)).triu(1).abs().max() < 0.1, "heads"
    assert torch.corrcoef(flat[0]).triu(1).abs().max() < 0.6, "queries"
    for other in (_gumbel(like, 0, 1, seed=0), _gumbel(like, 0, 0, seed=1)):
        assert torch.corrcoef(torch.stack((noise.flatten(), other.flatten())))[0, 1].abs() < 0.05
