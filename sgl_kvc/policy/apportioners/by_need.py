"""Every head gets the same share of what the scorer says it needs."""

from __future__ import annotations

import torch

from sgl_kvc.policy.apportioners._shares import split
from sgl_kvc.policy.pages import PagesContext

SOURCE = "FastGen, arXiv 2310.01801, algorithm 1, under a budget that is fixed before"

#: A little below what `kvc_kernels.score.put_first` lifts to, above all other scores.
_NEEDED = 5e8


def apportion(context: PagesContext) -> torch.Tensor:
    """Pages in proportion to those that hold keys which the scorer put first.

    Where the budget holds all of these, every head gets at least what it needs.
    """
    needed = context.above(_NEEDED).clamp(min=1)
    return split(context.total, needed.flatten(), 1, context.pages).view_as(needed)
