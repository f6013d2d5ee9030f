"""Layers whose output suffers more from what is dropped get more; heads of a layer alike."""

from __future__ import annotations

import torch

from sgl_kvc.policy.apportioners._shares import protected_pages, split
from sgl_kvc.policy.base import LayerContext
from sgl_kvc.policy.pages import PagesContext

SOURCE = "CompressKV, arXiv 2508.02401: error-aware budgets, |O - O'| / |O| of a layer"
NEEDS = ("output_projection",)
PARAMETERS = {
    "limit": {"default": 3.0, "min": 1.0, "max": 64.0},
}

_EPSILON = 1e-5  # the paper's


def observe(context: LayerContext, limit: float) -> torch.Tensor:
    """The relative error of a layer's output if every head kept the mean: float32 [1].

    Of the window's queries, with the keys that score best and the window's own; in the Frobenius
    norm, after the output projection.
    """
    del limit
    assert context.scores is not None
    assert context.facts.output_projection is not None
    projection = context.facts.output_projection[context.layer].float()
    n, own = context.length, context.queries.shape[0]
    best = context.scores.topk(min(context.kept, n), dim=-1).indices
    kept = torch.zeros_like(context.scores, dtype=torch.bool).scatter_(1, best, True)
    kept[:, n - own :] = True
    values = context.values.float().transpose(0, 1)[:, None]  # [H, 1, n, Dv]
    lost, whole = (torch.zeros((), device=kept.device) for _ in range(2))
    for _, attention in context.causal_attention():
        seen = attention.shape[-1]
        left = attention * kept[:, None, None, :seen]
        left /= left.sum(dim=-1, keepdim=True).clamp(min=1e-30)
        for weights, total in ((left - attention, lost), (attention, whole)):
            output = (weights @ values[:, :, :seen]).permute(2, 0, 1, 3).flatten(1)
            total += (output @ projection.T).square().sum()
    return (lost.sqrt() / (whole.sqrt() + _EPSILON)).view(1)


def apportion(context: PagesContext, limit: float) -> torch.Tensor:
    """Protected pages for all; the rest in proportion to the layers' errors.

    Parameters
    ----------
    limit : no layer gets more than so many times the mean
    """
    layers, heads, pages, mean = context.layers, context.heads, context.pages, context.mean
    assert context.statistics is not None  # as `observe` is there
    protected = protected_pages(context)
    most = min(int(limit * mean), pages) - protected
    won = split((mean - protected) * layers, context.statistics[:, 0], 0, most)
    return (protected + won)[:, None].repeat(1, heads)
