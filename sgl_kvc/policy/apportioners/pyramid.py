"""More for the first layers, less for the last, falling linearly; heads of a layer alike."""

from __future__ import annotations

import torch

from sgl_kvc.policy.apportioners._shares import split
from sgl_kvc.policy.base import PagesContext

SOURCE = "PyramidKV, arXiv 2406.02069: budgets fall linearly from first to last layer"
PARAMETERS = {
    "beta": {"default": 20, "min": 1, "max": 1000},
}


def apportion(context: PagesContext, beta: int) -> torch.Tensor:
    """From ``2 * mean - mean / beta`` pages a head in the first layer to ``mean / beta``.

    Where the first layer cannot hold that many, it keeps all it has and the slope is what the
    total then leaves. No head gets less than a page; the paper's code, and kvpress, instead give
    every layer the mean when the last one would get less than the window.

    Parameters
    ----------
    beta : the last layer keeps 1 / beta of the mean; 1 is uniform
    """
    layers, heads, pages = context.page_scores.shape
    mean = context.total // (layers * heads)
    last = max(1.0, mean / beta)
    first = 2 * mean - last
    if first > pages:
        first, last = pages, 2 * mean - pages
    slope = torch.linspace(
        first, last, layers, dtype=torch.float64, device=context.page_scores.device
    )
    return split(mean * layers, slope, 1, pages)[:, None].repeat(1, heads)
