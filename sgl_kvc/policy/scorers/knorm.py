"""Keys of small norm, which attention tends to favour."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext

SOURCE = "L2 norm-based strategy for KV cache compression, arXiv 2406.11430: -|k|"


def score(context: LayerContext) -> torch.Tensor:
    """Minus the key's L2 norm."""
    return -context.keys.float().norm(dim=-1).T
