"""Every head keeps the cheapest kind of keys that holds most of its attention."""

from __future__ import annotations

import torch
from kvc_kernels.score import put_first

from sgl_kvc.policy.base import LayerContext

SOURCE = (
    "FastGen, arXiv 2310.01801, algorithm 1: the cheapest policy that recovers T of the attention"
)
NEEDS = ("special_tokens", "punctuation")
PARAMETERS = {
    "window": {"default": 64, "min": 1, "max": 1024},
    "recovered": {"default": 0.95, "min": 0.0, "max": 1.0},
    "frequent": {"default": 0.3, "min": 0.0, "max": 1.0},
    "local": {"default": 0.3, "min": 0.0, "max": 1.0},
}


def score(
    context: LayerContext, window: int, recovered: float, frequent: float, local: float
) -> torch.Tensor:
    """Attention, with the kind of keys that the head needs before all others.

    The kinds, cheapest first: special tokens; and punctuation; and the most attended keys; and
    the nearest ones; all. The paper profiles with every query of the prompt and lets each head
    keep all of its kind. Here the last queries are the profile, and the budget decides: with the
    `global` apportioner heads of dear kinds get the pages that heads of cheap kinds leave.

    Parameters
    ----------
    window : last queries that the profile is made from
    recovered : share of its attention that the kind a head gets must hold
    frequent : share of the prompt that counts as most attended
    local : share of the prompt, before a query, that counts as near
    """
    del window
    n, heads = context.length, context.heads
    device, own = context.device, context.queries.shape[1] // heads * context.queries.shape[0]
    mean = context.window_attention() / own
    facts = context.facts
    assert facts.special_tokens is not None
    assert facts.punctuation is not None
    special = torch.isin(context.tokens, facts.special_tokens.to(device)).expand(heads, n)
    marks = special | torch.isin(context.tokens, facts.punctuation.to(device))
    hitters = mean.topk(int(frequent * n), dim=-1).indices
    common = marks.scatter(1, hitters, True)
    positions, reach = torch.arange(n, device=device), int(local * n)
    near = torch.zeros(heads, device=device)
    for first, attention in context.causal_attention():
        size, seen = attention.shape[2:]
        query = torch.arange(first, first + size, device=device)[:, None]
        close = positions[:seen] > query - reach
        mass = attention.sum(dim=1) * close * ~common[:, None, :seen]
        near += mass.sum(dim=(1, 2)) / own
    kinds = [special, marks, common, common | (positions >= n - reach), torch.ones_like(common)]
    held = [(mean * kind).sum(dim=-1) for kind in kinds[:3]]
    held += [held[2] + near, torch.full_like(near, 2.0)]
    enough = torch.stack(held) >= recovered - 1e-6
    kind = enough.int().argmax(dim=0)  # the first that is
    return put_first(mean, torch.stack(kinds)[kind, torch.arange(heads, device=device)])
