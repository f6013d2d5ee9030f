"""One competition over all layers and heads."""

from __future__ import annotations

import torch

from sgl_kvc.policy.apportioners._shares import LIFTED
from sgl_kvc.policy.pages import PagesContext

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
        profile) to this power, those below 0 divided by it; protected ones stay above all. 0 is
        the paper's
    """
    weights = context.facts.head_weights(profile_power) if profile_power else None
    return context.compete(
        context.total - context.layers * context.heads,
        1,
        groups=1,
        weights=None if weights is None else weights.to(context.device).flatten(),
        limit=LIFTED,
    )
