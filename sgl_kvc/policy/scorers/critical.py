"""Attention of the last queries, times how far a key's value moves the layer's output."""

from __future__ import annotations

import torch
from kvc_kernels.projection import projected_norm
from kvc_kernels.score import put_first, put_last_first

from sgl_kvc.policy.base import LayerContext

SOURCE = "CriticalKV, arXiv 2502.03805, algorithm 1"
NEEDS = ("output_projection",)
PARAMETERS = {
    "window": {"default": 32, "min": 1, "max": 1024},
    "pool": {"default": 7, "min": 1, "max": 255, "step": 2},
    "pooling": {"default": "max", "choices": ["max", "mean"]},
    "first_stage": {"default": 0.5, "min": 0.0, "max": 1.0},
    "epsilon": {"default": 0.0001, "min": 0.0, "max": 1.0},
}


def score(
    context: LayerContext,
    window: int,
    pool: int,
    pooling: str,
    first_stage: float,
    epsilon: float,
) -> torch.Tensor:
    """Part of the budget goes to the most attended keys, the rest by attention times norm.

    The norm is the L1 norm of the value after the output projection.

    Parameters
    ----------
    window : last queries that are looked at; their own keys come first, up to a quarter of the
        budget
    pool : width of the pool over neighbouring keys, odd; 1 is none
    pooling : whether a key gets the largest or the mean attention around it
    first_stage : part of the budget that goes by attention alone
    epsilon : added to the attention before it is multiplied
    """
    del window
    own, group = context.queries.shape[0], context.queries.shape[1] // context.heads
    attention = context.window_attention(pool=pool, pooling=pooling) / (own * group)
    count = min(int(first_stage * context.kept), attention.shape[1])
    best = put_last_first(attention, context.forced).topk(count, dim=-1).indices
    chosen = torch.zeros_like(attention, dtype=torch.bool).scatter_(1, best, True)
    chosen[:, attention.shape[1] - context.forced :] = True
    assert context.facts.output_projection is not None
    norm = projected_norm(context.values, context.facts.output_projection[context.layer])
    return put_first((attention + epsilon) * norm, chosen)
