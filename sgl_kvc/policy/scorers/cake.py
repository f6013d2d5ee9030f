"""Mean and variance of the last queries' attention: what matters now or shifts in and out."""

from __future__ import annotations

import torch
from kvc_kernels.score import pool_neighbours, put_last_first

from sgl_kvc.policy.base import LayerContext

SOURCE = "CAKE, arXiv 2503.12491: eviction indicator Mean(A) + gamma Var(A)"
PARAMETERS = {
    "window": {"default": 32, "min": 1, "max": 1024},
    "pool": {"default": 5, "min": 1, "max": 255, "step": 2},
    "pooling": {"default": "mean", "choices": ["mean", "max"]},
    "gamma": {"default": 200.0, "min": 0.0, "max": 1000000.0},
}


def score(
    context: LayerContext, window: int, pool: int, pooling: str, gamma: float
) -> torch.Tensor:
    """Mean plus `gamma` times the variance over the window, pooled, averaged over the group.

    Parameters
    ----------
    window : last queries that are looked at; their own keys come first, up to a quarter of the
        budget
    pool : width of the pool over neighbouring keys, odd; 1 is none
    pooling : whether a key gets the largest or the mean score around it
    gamma : weight of the variance
    """
    del window
    (own, query_heads), n, heads = context.queries.shape[:2], context.length, context.heads
    # In float64: a variance from sums loses what float32 has left of small attention.
    total = torch.zeros(heads, query_heads // heads, n, device=context.device).double()
    squares = torch.zeros_like(total)
    for _, attention in context.causal_attention():
        seen = attention.shape[-1]
        total[..., :seen] += attention.sum(dim=2)
        squares[..., :seen] += attention.double().square().sum(dim=2)
    variance = (squares - total**2 / own).clamp(min=0) / max(own - 1, 1)
    scores = (total / own + gamma * variance).float().flatten(0, 1)
    scores[:, : n - own] = pool_neighbours(scores[:, : n - own], pool, pooling)
    return put_last_first(scores.view(heads, -1, n).mean(dim=1), context.forced)
