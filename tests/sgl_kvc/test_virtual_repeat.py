"""The prompt read a second time: against the same in float64, by chunks, and by its edges."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kvc_kernels.repeat import leverage
from kvc_kernels.score import fade_to_neighbours

from sgl_kvc.policy.base import LayerContext, scorer
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.spec import parse
from tests.sgl_kvc.prompts import DIM, LAYERS, Prompt, close, prompt, score

NAME, PART = "virtual-repeat", 16


def _lse(p: Prompt) -> torch.Tensor:
    """Natural log-sum-exp [n, H*G] of every query's logits, dense, in float64."""
    n, heads = p.keys.shape[:2]
    queries = p.queries.double().view(n, heads, -1, DIM)
    logits = torch.einsum("qhgd,khd->hgqk", queries, p.keys.double()) * p.scale
    logits.masked_fill_(torch.ones(n, n).triu(1).bool(), float("-inf"))
    return logits.logsumexp(-1).permute(2, 0, 1).flatten(1)


def _moved(p: Prompt, shift: int) -> torch.Tensor:
    """Queries [n, H*G, D] `shift` positions on, turned as complex numbers, in float64."""
    table = p.facts.cos_sin.double()
    half = table.shape[1] // 2
    turn = torch.complex(table[shift, :half], table[shift, half:])
    turn = turn / turn.abs()
    front, rest = p.queries.double().split([2 * half, DIM - 2 * half], dim=-1)
    if p.facts.neox:
        turned = torch.complex(front[..., :half].contiguous(), front[..., half:].contiguous())
        turned = turned * turn
        return torch.cat((turned.real, turned.imag, rest), -1)
    turned = torch.view_as_complex(front.unflatten(-1, (half, 2)).contiguous()) * turn
    return torch.cat((torch.view_as_real(turned).flatten(-2), rest), -1)


def expected(p: Prompt, shift: int) -> torch.Tensor:
    """float64 [H, n], a query at a time."""
    n, heads = p.keys.shape[:2]
    group, lse, queries = p.queries.shape[1] // heads, _lse(p), _moved(p, shift)
    scores = torch.zeros(heads, n).double()
    for i in range(n):
        part = slice(i // PART * PART, min(n, (i // PART + 1) * PART))
        for lane in range(heads * group):
            weights = (p.keys[part, lane // group].double() @ queries[i, lane] * p.scale).exp()
            attention = weights / (weights.sum() + lse[i, lane].exp())
            scores[lane // group, part] = scores[lane // group, part].maximum(attention)
    return scores


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", ["plain", "partial", "scaled"])
@pytest.mark.parametrize("n", [3, 16, 40])
def test_virtual_repeat(neox, kind, n):
    p = prompt(n, neox=neox)
    table = p.facts.cos_sin
    table = {
        "plain": table,
        "partial": torch.cat((table[:, :2], table[:, DIM // 2 : DIM // 2 + 2]), -1),
        "scaled": table * 1.2,
    }[kind]
    p.facts = dataclasses.replace(p.facts, cos_sin=table)
    close(score(p, NAME, part=PART, shift=77), expected(p, 77))


@pytest.mark.parametrize("chunk", [1, 5, 15, 16, 17, 33])
def test_any_chunks_leave_the_same_state(chunk):
    p, states = prompt(), []
    for size in (chunk, 1 << 20):
        spec = parse({"rate": 4, "scorer": NAME, "apportioner": "global", "part": PART})
        method, state = scorer(spec), None
        for begin in range(0, 40, size):
            end = min(begin + size, 40)
            state = method.observe(LayerContext(
                0, LAYERS, p.queries[begin:end], PromptKVs.of(p.keys[:end], p.values[:end]),
                p.scale, spec,
                p.tokens[:end], p.kept, p.facts, state, last_chunk=end == 40,
            ))  # fmt: skip
            carried = 0 if end == 40 else end % PART
            assert state.scores.shape[1] == end - carried
            assert len(state.queries) == len(state.lse) == carried
        states.append(state)
    close(states[0].scores, states[1].scores)


def test_the_attention_kernels_sums_are_used():
    """Twice the first reading's sum, told by the kernel, leaves less for the second."""
    p = prompt(PART)
    spec = parse({"rate": 4, "scorer": NAME, "apportioner": "global", "part": PART})
    method = scorer(spec)
    context = LayerContext(
        0, LAYERS, p.queries, PromptKVs.of(p.keys, p.values), p.scale, spec, p.tokens, p.kept,
        p.facts,
    )
    known = _lse(p).float()

    def scores(lse: torch.Tensor | None) -> torch.Tensor:
        told = dataclasses.replace(context, lse=lse)
        return method.run(dataclasses.replace(told, state=method.observe(told)))

    close(scores(known), scores(None))
    assert (scores(known + 1) < scores(known)).all()


def test_a_key_that_only_its_own_part_reads_again_counts():
    """A query finds the key it matches anywhere in its part, before or after it, not elsewhere."""
    p = prompt(2 * PART, 1, 1)
    p.queries, p.keys = torch.zeros(2 * PART, 1, DIM), torch.zeros(2 * PART, 1, DIM)
    p.queries[3, 0, DIM // 2 - 1] = 40.0  # the slowest angle, which a shift hardly turns
    p.keys[[9, 25], 0, DIM // 2 - 1] = 1.0
    got = score(p, NAME, part=PART, shift=64)[0]
    assert got[9] > 0.9
    assert got[25] < 0.1


def test_leverage_is_added_and_scores_fade_to_neighbours():
    p = prompt()
    plain = score(p, NAME, part=PART)
    close(score(p, NAME, part=PART, leverage=2.0), plain + 2 * leverage(p.keys))
    close(score(p, NAME, part=PART, half_life=3.0), fade_to_neighbours(plain, 3.0))


@pytest.mark.parametrize("window", [5, 40])
def test_a_question_asked_again(window):
    """The last queries once more, behind themselves: they see their first time, causally."""
    p, n = prompt(), 40
    moved = _moved(p, window)
    tail = dataclasses.replace(p, queries=p.queries[-window:], keys=p.keys[-window:])
    own, echo = _lse(tail), torch.zeros(3, n).double()
    for i in range(window):
        for lane in range(6):
            weights = (p.keys[:, lane // 2].double() @ moved[n - window + i, lane] * p.scale).exp()
            attention = weights / (weights.sum() + own[i, lane].exp())
            echo[lane // 2] = echo[lane // 2].maximum(attention)
    plain = score(p, NAME, part=PART, window=window)
    close(score(p, NAME, part=PART, window=window, echo=3.0), plain.double().maximum(3 * echo))


def test_what_one_of_the_last_queries_attends_to_counts_too():
    p = prompt()
    paid = p.attention(8).amax(dim=(1, 2))
    plain = score(p, NAME, part=PART).double()
    assert (plain > paid).any()
    assert (plain < paid).any()
    close(score(p, NAME, part=PART, window=8, window_weight=1.0), plain.maximum(paid))
    close(score(p, NAME, part=PART, window=8, window_weight=2.0), plain.maximum(2 * paid))


def test_the_profile_weighs_what_is_read_again_but_not_the_question():
    p = prompt()
    p.facts = dataclasses.replace(p.facts, head_profile=None)
    plain, echo = score(p, NAME, part=PART), score(p, NAME, part=PART, window=8, echo=64.0)
    assert score(p, NAME, part=PART, repeat_power=2.0).equal(plain), "there is no profile"
    profile = torch.tensor([[0.5, 0.5, 0.5], [0.8, 0.2, 0.5]])
    p.facts = dataclasses.replace(p.facts, head_profile=profile)
    weights = (profile[p.layer] / 0.5)[:, None] ** 2
    close(score(p, NAME, part=PART, repeat_power=2.0), plain * weights)
    both = score(p, NAME, part=PART, window=8, echo=64.0, repeat_power=2.0)
    asked = echo > plain
    assert asked.any()
    close(both[asked], (plain * weights).maximum(echo)[asked])
