"""Each scorer against a slow, obvious version of it, or a case where the right keys are known."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sgl_kvc.spec import methods
from tests.sgl_kvc.prompts import DIM, Prompt, close, prompt, ranking, score

# --- all of them -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods("scorers"))
@pytest.mark.parametrize(("heads", "group"), [(1, 4), (2, 2), (4, 1)], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_short_prompts_of_all_kinds_of_heads(name, heads, group, n):
    """Finite, in float32, with windows longer than the prompt and a half-precision cache."""
    p = prompt(n, heads, group)
    for part in ("queries", "keys", "values"):
        setattr(p, part, getattr(p, part).bfloat16())
    knob = {"window": 64} if "window" in methods("scorers")[name].parameters else {}
    scores = score(p, name, **knob)
    assert scores.shape == (heads, n)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("name", [m.name for m in methods("scorers").values() if m.all_queries])
@pytest.mark.parametrize("chunk", [1, 7, 39])
def test_chunks_do_not_change_scores(name, chunk):
    p = prompt()
    close(score(p, name, chunk), score(p, name))


# --- statistics of queries ---------------------------------------------------------------------


def _turned(states: torch.Tensor, table: torch.Tensor, neox: bool) -> torch.Tensor:
    """Rotate the first R dims of [n, ..., D] as complex numbers, row i by table[i]."""
    half = table.shape[-1] // 2
    turn = torch.complex(table[:, :half].double(), table[:, half:].double())
    turn = turn.view(len(table), *[1] * (states.dim() - 2), half)
    front, rest = states[..., : 2 * half].double(), states[..., 2 * half :].double()
    if neox:
        turned = torch.complex(front[..., :half], front[..., half:]) * turn
        front = torch.cat((turned.real, turned.imag), -1)
    else:
        turned = torch.complex(front[..., ::2].contiguous(), front[..., 1::2].contiguous()) * turn
        front = torch.stack((turned.real, turned.imag), -1).flatten(-2)
    return torch.cat((front, rest), -1)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", ["plain", "partial", "scaled", "short table"])
def test_expected_attention(neox, kind):
    """Draw queries before rotation, rotate them; the scorer has to find what they were."""
    p, n, sinks, future = prompt(neox=neox), 40, 4, 16
    table = p.facts.cos_sin
    table = {
        "plain": table,
        "partial": torch.cat((table[:, :2], table[:, DIM // 2 : DIM // 2 + 2]), -1),
        "scaled": table * 1.2,
        "short table": table[:50],
    }[kind]
    p.facts = dataclasses.replace(p.facts, cos_sin=table)
    raw = p.queries + torch.randn(1, 6, DIM)
    p.queries = _turned(raw, table[:n], neox).float()

    seen = raw[sinks:].double()
    mean = seen.mean(dim=0)  # [H*G, D]
    ahead = table[n : n + future]
    cov = torch.stack([torch.cov(seen[:, head].T, correction=0) for head in range(6)])
    basis = torch.eye(DIM).expand(len(ahead), DIM, DIM)
    turn = _turned(basis, ahead, neox).mean(dim=0)  # row d is e_d, turned, averaged
    mean, cov = mean @ turn, turn.T @ cov @ turn
    expected = torch.zeros(3, n).double()
    for head in range(6):
        keys = p.keys[sinks:, head // 2].double()
        logits = keys @ mean[head] * p.scale
        logits += torch.einsum("ni,ij,nj->n", keys, cov[head], keys) * p.scale**2 / 2
        expected[head // 2, sinks:] += logits.softmax(0) / 2
    expected = (expected + 0.01) * p.values.double().norm(dim=-1).T
    got = score(p, "expected-attention", chunk=11, future=future, sinks=sinks, epsilon=0.01)
    close(got[:, sinks:], expected[:, sinks:], rtol=1e-3)


# --- keys and values alone ---------------------------------------------------------------------


def test_knorm_and_keydiff_know_the_odd_key():
    p = prompt(20, 1, 1)
    p.keys = torch.ones(20, 1, DIM) + 0.01 * torch.randn(20, 1, DIM)
    p.keys[7] *= 0.5  # small
    p.keys[11] = -p.keys[11]  # the other way
    assert ranking(score(p, "knorm")[0])[0] == 7
    assert ranking(score(p, "keydiff")[0])[0] == 11


def test_lagkv():
    p, n, sinks, lag = prompt(), 40, 4, 8
    p.keys, p.values = p.keys.double(), p.values.double()
    got = score(p, "lagkv", lag=lag, sinks=sinks)
    for head in range(3):
        for begin in range(sinks, sinks + 3 * lag, lag):  # parts 0 to 2 of 4 and a half
            spread = torch.zeros(lag).double()
            for states in (p.keys, p.values):
                part, after = states[begin : begin + lag, head], states[begin + lag :, head][:lag]
                least, most = after.min(0).values, after.max(0).values
                spread += ((part - least) / (most - least)).std(-1).softmax(-1)
            assert ranking(got[head, begin : begin + lag]) == ranking(spread)
        assert sorted((got[head, sinks : sinks + 3 * lag] * lag).tolist()) == sorted(
            [*range(lag)] * 3
        )
        kept = [*range(sinks), *range(sinks + 3 * lag, n)]
        assert (got[head, kept] >= 1).all()
    assert ranking(score(p, "lagkv")[0])[0] == n - 1, "too short for two parts: the newest"


# --- the kind of key a head needs --------------------------------------------------------------


def _heads_of_all_kinds() -> Prompt:
    """Five heads: one looks at special tokens, one also at punctuation, one at key 5, one at
    what is near, one at all alike."""
    n = 40
    p = prompt(n, 5, 1)
    p.tokens = torch.full((n,), 9)
    p.tokens[0], p.tokens[[8, 20]] = 0, 1
    p.keys, p.queries = torch.zeros(n, 5, DIM), torch.zeros(n, 5, DIM)
    p.queries[..., 0] = 30.0
    p.keys[0, :2, 0] = 2.0
    p.keys[[8, 20], 1, 0] = 2.0
    p.keys[5, 2, 0] = 2.0
    angles = torch.arange(n) * 0.04
    p.keys[:, 3, :2] = torch.stack((angles.cos(), angles.sin()), -1)
    p.queries[:, 3, :2] = 3000 * p.keys[:, 3, :2]
    p.queries[:, 4] = 0
    return p


def test_fastgen():
    n = 40
    got = score(
        _heads_of_all_kinds(), "fastgen", window=8, recovered=0.9, frequent=0.05, local=0.25
    )
    first = [set((row >= 1e8).nonzero().flatten().tolist()) for row in got]
    assert first[0] == {0}
    assert first[1] == {0, 8, 20}
    assert first[2] >= {0, 8, 20, 5}
    assert len(first[2]) <= 3 + 2
    assert first[3] >= {0, 8, 20} | set(range(n - 10, n))
    assert len(first[3]) <= 3 + 10 + 2
    assert first[4] == set(range(n))


def test_fastgen_counts_a_key_once():
    """Key 31 is both the most attended and near: with 60 % of the attention, not twice that."""
    p = _heads_of_all_kinds()
    p.keys[31, 4, 1], p.queries[:, 4, 1] = 1.0, 11.2
    assert p.attention(8)[4, 0, :, 31].mean() == pytest.approx(0.6, abs=0.03)
    got = score(p, "fastgen", window=8, recovered=0.9, frequent=0.05, local=0.25)
    assert (got[4] >= 1e8).all()


def test_fastgen_takes_all_where_nothing_else_is_enough():
    got = score(_heads_of_all_kinds(), "fastgen", window=8, recovered=1.0, frequent=0.0, local=0.0)
    assert (got[4] >= 1e8).all()
