"""Attention a key receives from every query of the prompt: its heavy hitters."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext
from sgl_kvc.policy.scorers._recent import put_recent_first

SOURCE = "H2O, arXiv 2306.14048, algorithm 1; KVC-full: KV-Compress, arXiv 2410.00161, eq. 8 and 19"
PARAMETERS = {
    "norm": {"default": "l2", "choices": ["l2", "l1"]},
    "average": {"default": False, "choices": [False, True]},
    "excluded": {"default": 0, "min": 0, "max": 4096},
    "recent_share": {"default": 0.0, "min": 0.0, "max": 1.0},
}
CONTINUAL = "attention"


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


def keep(state: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The sums of the `kept` keys."""
    return state[:, kept]


def score(
    context: LayerContext, norm: str, average: bool, excluded: int, recent_share: float
) -> torch.Tensor:
    """Attention summed over all queries and the query group.

    Parameters
    ----------
    norm : l2 sums squared attention, l1 attention
    average : divide by the number of queries that count for the key; a sum favours early keys,
        which more queries see. Attention in decode is added undivided
    excluded : a query does not count for the keys less than this many positions before it
    recent_share : share of the budget that the newest keys get, the heavy hitters the rest
    """
    del norm, recent_share
    scores = context.state
    if average:
        n = scores.shape[1]
        counted = torch.arange(n, 0, -1, device=scores.device) - excluded
        scores = scores / counted.clamp(min=1)
    return scores


def lift(
    scores: torch.Tensor,
    kept: int,
    behind: int,
    norm: str,
    average: bool,
    excluded: int,
    recent_share: float,
) -> None:
    """The newest keys first, as many as their share of the budget holds."""
    del norm, average, excluded
    put_recent_first(scores, int(recent_share * kept) - behind)
