"""One competition over all layers and heads."""

from __future__ import annotations

import torch

from sgl_kvc.policy.apportioners._shares import LIFTED
from sgl_kvc.policy.base import ModelFacts, PagesContext

SOURCE = "KV-Compress, arXiv 2410.00161, algorithm 1; with profile_power ours"
PARAMETERS = {
    "profile_power": {"default": 0.0, "min": 0.0, "max": 8.0},
}
CONTINUAL = True


def apportion(context: PagesContext, profile_power: float) -> torch.Tensor:
    """The `total` best pages of the whole model; every head keeps its best one.

    Scores tell what the last queries attend to. A head that finds keys by their content will
    attend elsewhere once the answer is under way (to the next word of what is copied, to the next
    question's key), so its pages may count more than they have shown yet. Where the model has no
    head profile they count as they are.

    Parameters
    ----------
    profile_power : before heads compete, scores are multiplied by (the head's profile / the mean
        profile) to this power; 0 is the paper's
    """
    layers, heads, pages = context.page_scores.shape
    counts = torch.ones(layers * heads, dtype=torch.int64, device=context.page_scores.device)
    if pages > 1:
        contested = _weighted(context.page_scores[:, :, 1:], context.facts, profile_power)
        winners = contested.flatten().topk(context.total - len(counts)).indices // (pages - 1)
        counts.scatter_add_(0, winners, torch.ones_like(winners))
    return counts.view(layers, heads)


def _weighted(scores: torch.Tensor, facts: ModelFacts, power: float) -> torch.Tensor:
    """Scores [L, H, n] by the heads' profile; protected ones stay above all, negative below."""
    weights = facts.head_weights(power) if power else None
    if weights is None:
        return scores
    weight = weights.to(scores)[..., None]
    weighted = torch.where(scores > 0, scores * weight, scores / weight).clamp(max=LIFTED)
    return torch.where(scores > LIFTED, scores, weighted)
