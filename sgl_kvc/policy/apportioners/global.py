"""One competition over all layers and heads."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import PagesContext

SOURCE = "KV-Compress, arXiv 2410.00161, algorithm 1"
CONTINUAL = True


def apportion(context: PagesContext) -> torch.Tensor:
    """The `total` best pages of the whole model; every head keeps its best one."""
    layers, heads, pages = context.page_scores.shape
    counts = torch.ones(layers * heads, dtype=torch.int64, device=context.page_scores.device)
    if pages > 1:
        contested = context.page_scores[:, :, 1:].flatten()
        winners = contested.topk(context.total - len(counts)).indices // (pages - 1)
        counts.scatter_add_(0, winners, torch.ones_like(winners))
    return counts.view(layers, heads)
