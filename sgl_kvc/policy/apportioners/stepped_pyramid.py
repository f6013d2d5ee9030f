"""More for the first layers, less for the last, falling in steps of several layers."""

from __future__ import annotations

import torch

from sgl_kvc.policy.apportioners._shares import split
from sgl_kvc.policy.apportioners.pyramid import slope
from sgl_kvc.policy.pages import PagesContext

SOURCE = "WindowKV, arXiv 2503.17922: budgets fall linearly from group to group of layers"
PARAMETERS = {
    "step": {"default": 8, "min": 1, "max": 128},
    "last_share": {"default": 0.57, "min": 0.0, "max": 1.0},
}


def apportion(context: PagesContext, step: int, last_share: float) -> torch.Tensor:
    """The same for a step's layers, to a page, and for their heads; no head gets less than one.

    Parameters
    ----------
    step : layers that get the same
    last_share : share of the mean that the last layers get (the paper's: `step` / 14); 1 is
        uniform
    """
    layers, heads, pages, mean = context.layers, context.heads, context.pages, context.mean
    steps, device = -(-layers // step), context.device
    falling = slope(mean, pages, mean * last_share, steps, device)
    falling = falling.repeat_interleave(step)[:layers]
    return split(mean * layers, falling, 1, pages)[:, None].repeat(1, heads)
