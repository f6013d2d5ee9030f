"""What scorers share that give the newest keys a part of the budget."""

from __future__ import annotations

import torch
from kvc_kernels.score import put_first


def put_recent_first(scores: torch.Tensor, count: int) -> None:
    """Lift the last `count` of `scores` [..., n] above all others, in place.

    They keep their order. Where a head has no key its score, -inf, stays.
    """
    last = scores[..., scores.shape[-1] - min(max(0, count), scores.shape[-1]) :]
    lifted = put_first(last, torch.ones_like(last, dtype=torch.bool))
    last.copy_(torch.where(last == -torch.inf, last, lifted))
