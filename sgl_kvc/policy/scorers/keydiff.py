"""Keys unlike the others of their head."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kvc.policy.base import LayerContext

SOURCE = "KeyDiff, arXiv 2504.15364: -cos(k, mean of k / |k|)"


def score(context: LayerContext) -> torch.Tensor:
    """Minus the cosine similarity to the mean of the head's normalised keys."""
    keys = context.keys.float()
    anchor = F.normalize(keys, dim=-1).mean(dim=0)
    return -F.cosine_similarity(keys, anchor, dim=-1).T
