"""The most attention any of the last queries and heads pays: the worst loss if a key goes."""

from __future__ import annotations

import torch
from kvc_kernels.projection import projected_norm
from kvc_kernels.score import pool_neighbours, put_first

from sgl_kvc.policy.base import LayerContext

SOURCE = "DefensiveKV, arXiv 2510.13334: worst-case aggregation, prior-risk correction"
NEEDS = ("output_projection",)
PARAMETERS = {
    "window": {"default": 32, "min": 1, "max": 1024},
    "pool": {"default": 5, "min": 1, "max": 255, "step": 2},
    "pooling": {"default": "mean", "choices": ["mean", "max"]},
    "first_stage": {"default": 0.9, "min": 0.0, "max": 1.0},
}


def score(
    context: LayerContext, window: int, pool: int, pooling: str, first_stage: float
) -> torch.Tensor:
    """The worst case, at least its mean over the head's keys, times the projected value's norm.

    As in its authors' code, the norm is a key's share among the heads, and before all others
    come the keys that hold most of the mean attention (CriticalKV's first stage).

    Parameters
    ----------
    window : last queries that are looked at; their own keys come first, up to a quarter of the
        budget
    pool : width of the pool over neighbouring keys, odd; 1 is none
    pooling : whether a key gets the largest or the mean attention around it
    first_stage : the most attended keys come first until they and those of the window that come
        first hold this share of the attention
    """
    del window
    own, n, heads = context.queries.shape[0], context.length, context.heads
    before, ranked = n - own, n - context.forced
    worst = torch.zeros(heads, ranked, device=context.device)
    mean = torch.zeros_like(worst)
    for _, attention in context.causal_attention():
        attention = attention[..., :ranked]
        seen = attention.shape[-1]
        mean[:, :seen] += attention.mean(dim=1).sum(dim=1) / own
        worst[:, before:seen] = worst[:, before:seen].maximum(attention[..., before:].amax((1, 2)))
        attention = attention[..., :before]
        pooled = pool_neighbours(attention.flatten(0, 2), pool, pooling).view_as(attention)
        mass = attention.sum(dim=-1, keepdim=True)
        pooled = pooled * (mass / pooled.sum(dim=-1, keepdim=True).clamp(min=1e-30))
        worst[:, :before] = worst[:, :before].maximum(pooled.amax(dim=(1, 2)))
    risk = worst.maximum(worst.mean(dim=-1, keepdim=True)) if ranked else worst
    assert context.facts.output_projection is not None
    norm = projected_norm(context.values, context.facts.output_projection[context.layer])
    share = norm[:, :ranked] / norm[:, :ranked].sum(dim=0).clamp(min=1e-30)
    scores = torch.ones(heads, n, device=risk.device)
    scores[:, :ranked] = risk * share
    chosen = torch.ones_like(scores, dtype=torch.bool)
    chosen[:, :ranked] = _holding(mean, first_stage, context.kept - context.forced)
    return put_first(scores, chosen)


def _holding(mean: torch.Tensor, share: float, room: int) -> torch.Tensor:
    """The fewest keys of [H, n] that, with those left out, hold `share` of all; at most `room`."""
    ranked, order = mean.sort(dim=-1, descending=True, stable=True)
    left_out = 1 - mean.sum(dim=-1, keepdim=True)
    needed = ranked.cumsum(dim=-1) - ranked + left_out < share
    needed[:, max(0, room) :] = False
    return torch.zeros_like(needed).scatter_(1, order, needed)
