"""Whole runs of neighbouring keys by their attention, the same for all heads of some layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kvc_kernels.score import put_last_first

from sgl_kvc.policy.base import LayerContext

SOURCE = "WindowKV, arXiv 2503.17922: windows of consecutive tokens, shared by groups of layers"
PARAMETERS = {
    "window": {"default": 32, "min": 1, "max": 1024},
    "run": {"default": 8, "min": 1, "max": 1024},
    "best": {"default": 0.5, "min": 0.0, "max": 1.0},
    "sharing": {"default": 8, "min": 1, "max": 128},
}


def score(context: LayerContext, window: int, run: int, best: float, sharing: int) -> torch.Tensor:
    """A key's score is that of its run; of every few layers the first one chooses.

    A run's score is the mean of its most attended keys' attention, averaged over the layer's query
    heads. The paper calls runs windows and what is here called window the suffix.

    Parameters
    ----------
    window : last queries that are looked at; their own keys come first, up to a quarter of the
        budget
    run : consecutive keys that stay or go together
    best : share of a run's keys that count, at least one; 1 is all. The paper takes half for tasks
        that gather information and all for those that locate it, as a classifier says
    sharing : layers that keep the same runs, those after the first at no cost
    """
    del window
    if context.layer % sharing and context.previous is not None:
        return context.previous
    own, n, heads = context.queries.shape[0], context.length, context.heads
    before, counted = n - own, max(1, int(best * run))
    total = torch.zeros(-(-max(before, 1) // run), device=context.device)
    lengths = (before - run * torch.arange(len(total), device=total.device)).clamp(1, run)
    attention = _summed(context)  # [H*G, n]
    padded = F.pad(attention[:, :before], (0, len(total) * run - before))
    largest = padded.unflatten(1, (len(total), run)).topk(counted, dim=-1).values
    total = largest.sum(dim=-1).mean(dim=0) / lengths.clamp(max=counted)
    scores = attention.mean(dim=0)
    scores[:before] = total.repeat_interleave(run)[:before]
    return put_last_first(scores.expand(heads, n), context.forced)


def _summed(context: LayerContext) -> torch.Tensor:
    """Attention every query head pays each key, summed over the window: float32 [H*G, n]."""
    query_heads = context.queries.shape[1]
    sums = torch.zeros(query_heads, context.length, device=context.device)
    for _, attention in context.causal_attention():
        sums[:, : attention.shape[-1]] += attention.sum(dim=2).flatten(0, 1)
    return sums
