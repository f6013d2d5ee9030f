"""Keys that were pivotal for many of the last queries stay pivotal."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext

SOURCE = "Scissorhands, arXiv 2305.17118, algorithm 2"
PARAMETERS = {
    "window": {"default": 64, "min": 1, "max": 1024},
}


def score(context: LayerContext, window: int) -> torch.Tensor:
    """Minus the queries that gave the key less than an even share of their attention.

    The paper leaves ties open; here the key with more attention wins.

    Parameters
    ----------
    window : last queries that are looked at (the paper's history window)
    """
    del window
    n, heads = context.length, context.heads
    low = torch.zeros(heads, n, device=context.device)
    mean = torch.zeros_like(low)
    for first, attention in context.causal_attention():
        size, seen = attention.shape[2:]
        position = torch.arange(first, first + size, device=low.device)[:, None]
        visible = torch.arange(seen, device=low.device) <= position
        low[:, :seen] += ((attention * (position + 1) < 1) & visible).sum(dim=(1, 2))
        mean[:, :seen] += attention.sum(dim=(1, 2))
    return 0.5 * mean / context.queries.shape[0] / attention.shape[1] - low
