"""Attention of the last queries of the heads that retrieve, one ranking for all of a layer."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext

SOURCE = "CompressKV, arXiv 2508.02401: semantic retrieval heads choose for their layer"
NEEDS = ("head_profile",)
PARAMETERS = {
    "window": {"default": 8, "min": 1, "max": 1024},
    "pool": {"default": 5, "min": 1, "max": 255, "step": 2},
    "pooling": {"default": "mean", "choices": ["mean", "max"]},
    "retrieving": {"default": 1, "min": 1, "max": 128},
}


def score(
    context: LayerContext, window: int, pool: int, pooling: str, retrieving: int
) -> torch.Tensor:
    """Attention averaged over the window and pooled, then averaged over the chosen heads.

    Parameters
    ----------
    window : last queries that are looked at
    pool : width of the pool over neighbouring keys, odd; 1 is none
    pooling : whether a key gets the largest or the mean score around it
    retrieving : KV heads of every layer that choose, those with the highest profile; the paper has
        four query heads
    """
    del window
    own, n, heads = context.queries.shape[0], context.length, context.heads
    group = context.queries.shape[1] // heads
    assert context.facts.head_profile is not None
    profile = context.facts.head_profile[context.layer].to(context.device)
    chosen = profile.sort(descending=True, stable=True).indices[:retrieving]
    attention = context.window_attention(pool=pool, pooling=pooling)[chosen] / (own * group)
    return attention.mean(dim=0).expand(heads, n)
