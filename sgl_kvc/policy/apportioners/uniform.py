"""The same number of pages for every head (SnapKV, StreamingLLM)."""

from __future__ import annotations

import torch


def apportion(page_scores: torch.Tensor, total: int) -> torch.Tensor:
    """`total` is a multiple of the number of heads: blocks hold a page of each."""
    layers, heads, _ = page_scores.shape
    return torch.full((layers, heads), total // (layers * heads), device=page_scores.device)
