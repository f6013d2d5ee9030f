"""Attention of the last query, one ranking for all heads of a layer."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext

SOURCE = "TOVA, arXiv 2401.06104: Token Omission Via Attention, one ranking per layer"


def score(context: LayerContext) -> torch.Tensor:
    """The last query's attention, averaged over the layer's query heads."""
    attention = context.window_attention(group="mean")
    return attention.mean(dim=0).expand_as(attention)
