"""More for the first layers, less for the last; the heads of a layer compete for its share."""

from __future__ import annotations

import torch

from sgl_kvc.policy.apportioners._shares import compete
from sgl_kvc.policy.apportioners.pyramid import layer_pages
from sgl_kvc.policy.pages import PagesContext

SOURCE = "Ada-PyramidKV: Ada-KV, arXiv 2407.11550, section 5, on PyramidKV, arXiv 2406.02069"
PARAMETERS = {
    "beta": {"default": 20, "min": 1, "max": 1000},
    "floor": {"default": 0.2, "min": 0.0, "max": 1.0},
}


def apportion(context: PagesContext, beta: int, floor: float) -> torch.Tensor:
    """The layers' shares are `pyramid`'s; in a layer the heads have a floor, as in `adaptive`.

    Parameters
    ----------
    beta : the last layer keeps 1 / beta of the mean; 1 is the same for all layers
    floor : share of its layer's mean that every head keeps; 1 is the same for all heads of a layer
    """
    return compete(context, layer_pages(context, beta), floor)
