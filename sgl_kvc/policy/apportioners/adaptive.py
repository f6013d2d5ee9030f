"""Every layer gets the same; its heads compete for it."""

from __future__ import annotations

import torch

from sgl_kvc.policy.apportioners._shares import compete
from sgl_kvc.policy.pages import PagesContext

SOURCE = "Ada-KV, arXiv 2407.11550, algorithm 1, with its safeguard alpha (here `floor`)"
PARAMETERS = {
    "floor": {"default": 0.2, "min": 0.0, "max": 1.0},
}


def apportion(context: PagesContext, floor: float) -> torch.Tensor:
    """The layer's best pages, after every head has its floor.

    The paper's code lets heads compete for everything and then mixes in even shares,
    ``(1 - floor) * won + floor * mean``; here, as in kvpress, the floor is given first and the
    rest competed for.

    Parameters
    ----------
    floor : share of the mean that every head keeps; 1 is uniform
    """
    mean = torch.full((context.layers,), context.mean, device=context.device)
    return compete(context, mean, floor)
