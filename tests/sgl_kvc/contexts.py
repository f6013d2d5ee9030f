"""What apportioners see, from page scores as they are written down in a test."""

from __future__ import annotations

import torch
from kvc_kernels.select import RankedPages

from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.pages import PagesContext


def pages_context(
    page_scores: torch.Tensor,
    total: int,
    statistics: torch.Tensor | None = None,
    facts: ModelFacts | None = None,
) -> PagesContext:
    """Of heads whose pages, [L, H, C], hold one KV each: its score is the page's."""
    rows = page_scores.flatten(0, 1).contiguous()
    layers = len(page_scores)
    return PagesContext(RankedPages(rows, 1), layers, total, statistics, facts or ModelFacts())
