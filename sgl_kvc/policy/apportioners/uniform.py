"""The same number of pages for every head."""

from __future__ import annotations

import torch

from sgl_kvc.policy.pages import PagesContext

SOURCE = "SnapKV, arXiv 2404.14469; StreamingLLM, arXiv 2309.17453"
CONTINUAL = True


def apportion(context: PagesContext) -> torch.Tensor:
    """`total` is a multiple of the number of heads: blocks hold a page of each."""
    return torch.full((context.layers, context.heads), context.mean, device=context.device)
