"""Attention a key receives from every query of the prompt: its heavy hitters."""

from __future__ import annotations

import torch
from kvc_kernels.score import put_last_first

from sgl_kvc.policy.base import LayerContext

SOURCE = "H2O, arXiv 2306.14048, algorithm 1; KVC-full: KV-Compress, arXiv 2410.00161, eq. 8 and 19"
PARAMETERS = {
    "norm": {"default": "l2", "choices": ["l2", "l1"]},
    "average": {"default": False, "choices": [False, True]},
    "excluded": {"default": 0, "min": 0, "max": 4096},
    "recent_share": {"default": 0.0, "min": 0.0, "max": 1.0},
}


def observe(
    context: LayerContext, norm: str, average: bool, excluded: int, recent_share: float
) -> torch.Tensor:
    """float32 [H, n], the sums so far."""
    del average, recent_share
    power = 2 if norm == "l2" else 1
    sums = context.window_attention(power, excluded=excluded)
    if context.state is not None:
        sums[:, : context.state.shape[1]] += context.state
    return sums


def score(
    context: LayerContext, norm: str, average: bool, excluded: int, recent_share: float
) -> torch.Tensor:
    """Attention summed over all queries and the query group.

    Parameters
    ----------
    norm : l2 sums squared attention, l1 attention
    average : divide by the number of queries that count for the key; a sum favours early keys,
        which more queries see
    excluded : a query does not count for the keys less than this many positions before it
    recent_share : share of the budget that the newest keys get, the heavy hitters the rest
    """
    del norm
    scores = context.state
    if average:
        n = scores.shape[1]
        counted = torch.arange(n, 0, -1, device=scores.device) - excluded
        scores = scores / counted.clamp(min=1)
    return put_last_first(scores, int(recent_share * context.kept))
