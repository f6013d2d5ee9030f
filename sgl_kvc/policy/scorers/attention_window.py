"""Attention a key receives from the prompt's last queries."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext

SOURCE = (
    "SnapKV, arXiv 2404.14469, section 4; squared: KV-Compress, arXiv 2410.00161, eq. 8; with "
    "half_life and profile_reach ours"
)
PARAMETERS = {
    "window": {"default": 8, "min": 1, "max": 1024},
    "pool": {"default": 7, "min": 1, "max": 255, "step": 2},
    "pooling": {"default": "max", "choices": ["max", "mean"]},
    "norm": {"default": "l2", "choices": ["l2", "l1"]},
    "group": {"default": "sum", "choices": ["sum", "mean"]},
    "half_life": {"default": 0.0, "min": 0.0, "max": 1024.0},
    "profile_reach": {"default": 1.0, "min": 1.0, "max": 64.0},
}
CONTINUAL = "attention"


def score(
    context: LayerContext,
    window: int,
    pool: int,
    pooling: str,
    norm: str,
    group: str,
    half_life: float,
    profile_reach: float,
) -> torch.Tensor:
    """Attention summed over the window and the query group, pooled over neighbours.

    The window's own keys are not pooled with the others: `spec.recent` keeps them.

    Parameters
    ----------
    window : last queries that are looked at
    pool : width of the pool over neighbouring keys, odd; 1 is none
    pooling : whether a key gets the largest or the mean score around it
    norm : l2 sums squared attention, l1 attention
    group : sum adds the query heads that share a KV head, mean averages their attention
        before it is squared
    half_life : above 0, every key, the window's too, counts at least what another does, halved
        every so many positions between them; 0 is off
    profile_reach : heads that retrieve will attend to what stands next to what they attend to
        now, so half_life is multiplied by (the head's profile / the mean profile), at most by
        this and at least by 1 / this: others' gets shorter. 1 leaves it, as does no profile
    """
    del window  # the context holds no other queries
    power = 2 if norm == "l2" else 1
    return context.window_attention(
        power, group=group, pool=pool, pooling=pooling, half_life=half_life, reach=profile_reach
    )
