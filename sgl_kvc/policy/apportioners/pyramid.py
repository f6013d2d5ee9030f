"""More for the first layers, less for the last, falling linearly; heads of a layer alike."""

from __future__ import annotations

import torch

from sgl_kvc.policy.apportioners._shares import split
from sgl_kvc.policy.pages import PagesContext

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
    return layer_pages(context, beta)[:, None].repeat(1, context.heads)


def layer_pages(context: PagesContext, beta: int) -> torch.Tensor:
    """int64 [L], pages of each head of a layer."""
    layers, pages, mean = context.layers, context.pages, context.mean
    falling = slope(mean, pages, mean / beta, layers, context.device)
    return split(mean * layers, falling, 1, pages)


def slope(
    mean: int, pages: int, last: float, steps: int, device: torch.device
) -> torch.Tensor:
    """float64 [steps], falling to `last`, at least 1, so that their mean is `mean`.

    The first is at most `pages`; the last is then more.
    """
    last = max(1.0, last)
    first = 2 * mean - last
    if first > pages:
        first, last = pages, 2 * mean - pages
    return torch.linspace(first, last, steps, dtype=torch.float64, device=device)
