"""Prompts for the scorers' tests: random tensors of one layer, and what a scorer says of them."""

from __future__ import annotations

import dataclasses

import torch

from sgl_kvc.policy.base import LayerContext, scorer
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.spec import parse

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
        head_profile=torch.rand(LAYERS, heads),
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
        p.layer, LAYERS, p.queries[-spec.window :], PromptKVs.of(p.keys, p.values), p.scale, spec,
        p.tokens, p.kept, p.facts,
    )  # fmt: skip
    state = None
    if method.observe is not None:
        for begin in range(0, n, chunk):
            end = min(begin + chunk, n)
            part = dataclasses.replace(
                context,
                queries=p.queries[begin:end],
                kvs=PromptKVs.of(p.keys[:end], p.values[:end]),
                tokens=p.tokens[:end],
                state=state,
                last_chunk=end == n,
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
