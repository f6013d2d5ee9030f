"""Random scores: the baseline every method has to beat."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext

SOURCE = "the baseline"


def score(context: LayerContext) -> torch.Tensor:
    """Uniform scores, the same for the same layer and prompt length."""
    tokens, heads = context.length, context.heads
    generator = torch.Generator().manual_seed(tokens * 1009 + context.layer)
    return torch.rand(heads, tokens, generator=generator).to(context.device)
