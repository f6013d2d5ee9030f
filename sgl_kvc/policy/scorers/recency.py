"""Newest keys first; with protected sinks this is StreamingLLM."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext

SOURCE = "StreamingLLM, arXiv 2309.17453, section 3"
CONTINUAL = "position"


def score(context: LayerContext) -> torch.Tensor:
    """The key's position."""
    tokens, heads = context.length, context.heads
    positions = torch.arange(tokens, device=context.device, dtype=torch.float32)
    return positions.expand(heads, tokens)
