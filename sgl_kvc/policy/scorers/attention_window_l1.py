"""Attention of the prompt's last queries (SnapKV, arXiv 2404.14469, section 4)."""

from __future__ import annotations

import torch
from kvc_kernels.score import max_pool, window_attention

from sgl_kvc.policy.base import LayerContext


def score(context: LayerContext) -> torch.Tensor:
    """Sum of attention over the window and the query group, max-pooled.

    Parameters used: ``window`` (queries looked at), ``pool`` (neighbours lifted along).
    """
    scores = window_attention(context.queries, context.keys, context.scale, power=1)
    return max_pool(scores, context.spec.pool)
