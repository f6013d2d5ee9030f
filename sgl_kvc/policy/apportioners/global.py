"""One competition over all layers and heads (KV-Compress, arXiv 2410.00161, algorithm 1)."""

from __future__ import annotations

import torch


def apportion(page_scores: torch.Tensor, total: int) -> torch.Tensor:
    """The `total` best pages of the whole model; every head keeps its best one."""
    layers, heads, pages = page_scores.shape
    ranked = page_scores.reshape(layers * heads, pages)
    if pages == 1:
        return torch.ones((layers, heads), dtype=torch.int64, device=ranked.device)
    rest = ranked[:, 1:].flatten().topk(total - layers * heads).indices // (pages - 1)
    return (1 + rest.bincount(minlength=layers * heads)).view(layers, heads)
