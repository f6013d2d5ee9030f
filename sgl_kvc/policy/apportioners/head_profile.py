"""Heads that retrieve keep what they can; the others sinks and recent keys only."""

from __future__ import annotations

import math

import torch

from sgl_kvc.policy.apportioners._shares import protected_pages, split
from sgl_kvc.policy.pages import PagesContext

SOURCE = "RazorAttention, arXiv 2407.15891; DuoAttention, arXiv 2410.10819"
NEEDS = ("head_profile",)
PARAMETERS = {
    "retrieval": {"default": 0.25, "min": 0.0, "max": 1.0},
}


def apportion(context: PagesContext, retrieval: float) -> torch.Tensor:
    """Protected pages for all; the rest evenly to the heads with the highest profile.

    What these cannot hold goes evenly to the others. RazorAttention takes 15 % of the heads,
    DuoAttention 25 % of KV heads with query groups and half of those without. The compensation
    token of RazorAttention is left out: the cache holds nothing but the prompt's KVs.

    Parameters
    ----------
    retrieval : share of the heads that are retrieval heads; 0 and 1 are uniform
    """
    pages, mean, device = context.pages, context.mean, context.device
    assert context.facts.head_profile is not None
    profile = context.facts.head_profile.to(device).flatten()
    best_first = profile.sort(descending=True, stable=True).indices
    retrieving = torch.arange(len(profile), device=device)
    retrieving = retrieving < math.ceil(retrieval * len(profile) - 1e-9)
    protected = protected_pages(context)
    rest = (mean - protected) * len(profile)
    counts = torch.empty_like(best_first)
    counts[best_first] = protected + split(rest, retrieving, 0, pages - protected)
    return counts.view(context.layers, context.heads)
