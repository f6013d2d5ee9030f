"""Each scorer against a slow, obvious version of it, or a case where the right keys are known."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sgl_kvc.policy.base import LayerContext, ModelFacts, scorer
from sgl_kvc.policy.scorers.keyformer import _gumbel
from sgl_kvc.spec import methods, parse

LAYERS, DIM, HIDDEN = 2, 8, 12


@dataclasses.dataclass
class Prompt:
    """A prompt's tensors in one layer: queries [n, H*G, D], keys and values [n, H, D]."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tokens: torch.Tensor
    facts: ModelFacts
    layer: int = 1
    kept: int = 10
    scale: float = DIM**-0.5

    def attention(self, window: int | None = None) -> torch.Tensor:
        """[H, G, w, n], dense, in float64: of the last `window` queries or of all."""
        (n, heads), w = self.keys.shape[:2], window or len(self.queries)
        queries = self.queries.double().view(n, heads, -1, DIM)
        logits = torch.einsum("qhgd,khd->hgqk", queries, self.keys.double()) * self.scale
        logits.masked_fill_(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return logits.softmax(dim=-1)[:, :, -w:]


def prompt(n: int = 40, heads: int = 3, group: int = 2, neox: bool = True) -> Prompt:
    torch.manual_seed(n)
    angles = torch.outer(torch.arange(256), 1e4 ** -(torch.arange(0, DIM, 2) / DIM))
    facts = ModelFacts(
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1),
        neox=neox,
        output_projection=[torch.randn(HIDDEN, heads * group * DIM) for _ in range(LAYERS)],
        special_tokens=torch.tensor([0]),
        punctuation=torch.tensor([1]),
    )
    return Prompt(
        2 * torch.randn(n, heads * group, DIM),
        2 * torch.randn(n, heads, DIM),
        torch.randn(n, heads, DIM),
        torch.randint(20, (n,)),
        facts,
    )


def score(p: Prompt, name: str, chunk: int = 1 << 20, **knob) -> torch.Tensor:
    """What the engine would have: the prompt in chunks, then the window."""
    spec = parse({"rate": 4, "scorer": name, "apportioner": "uniform", **knob})
    method, n = scorer(spec), len(p.queries)
    context = LayerContext(
        p.layer, LAYERS, p.queries[-spec.window :], p.keys, p.values, p.scale, spec,
        p.tokens, p.kept, p.facts,
    )  # fmt: skip
    state = None
    if method.observe is not None:
        for begin in range(0, n, chunk):
            end = min(begin + chunk, n)
            part = dataclasses.replace(
                context,
                queries=p.queries[begin:end],
                keys=p.keys[:end],
                values=p.values[:end],
                tokens=p.tokens[:end],
                state=state,
            )
            state = method.observe(part)
    return method.run(dataclasses.replace(context, state=state))


def lifted(scores: torch.Tensor, kept: int, name: str, behind: int = 0, **knob) -> torch.Tensor:
    """`scores` as selection sees them."""
    scores = scores.clone()
    spec = parse({"rate": 4, "scorer": name, "apportioner": "uniform", **knob})
    scorer(spec).lift(scores, kept, behind)
    return scores


def close(got: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected.float(), rtol=rtol, atol=1e-6)


def ranking(row: torch.Tensor) -> list[int]:
    return row.argsort(descending=True, stable=True).tolist()


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
