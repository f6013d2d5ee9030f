"""Layers whose attention is spread out and shifts get more; heads of a layer alike."""

from __future__ import annotations

import torch

from sgl_kvc.policy.apportioners._shares import protected_pages, split
from sgl_kvc.policy.base import LayerContext
from sgl_kvc.policy.pages import PagesContext

SOURCE = "CAKE, arXiv 2503.12491: preference P = H^(1/tau1) V^(1/tau2) of a layer"
PARAMETERS = {
    "tau1": {"default": 1.0, "min": 0.1, "max": 10.0},
    "tau2": {"default": 1.0, "min": 0.1, "max": 10.0},
}


def observe(context: LayerContext, tau1: float, tau2: float) -> torch.Tensor:
    """Spatial dispersion and temporal shift of a layer's attention: float32 [2].

    Of the attention A of the window's queries over the keys before it: the entropy ``H = -sum A
    log A``, and the variance over the queries, ``V = sum var A``, both summed over keys and heads.
    """
    del tau1, tau2
    queries, keys = context.queries.float(), context.keys.float()
    window, before = queries.shape[0], keys.shape[0] - queries.shape[0]
    grouped = queries.view(window, keys.shape[1], -1, queries.shape[-1])
    logits = torch.einsum("whgd,nhd->hgwn", grouped, keys) * context.scale
    later = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu_(1)
    logits[..., before:].masked_fill_(later, float("-inf"))
    attention = logits.softmax(dim=-1)[..., :before]
    dispersion = torch.special.entr(attention).sum()
    shift = (attention - attention.mean(dim=-2, keepdim=True)).square().mean(dim=-2).sum()
    return torch.stack([dispersion, shift])


def apportion(context: PagesContext, tau1: float, tau2: float) -> torch.Tensor:
    """Protected pages for all; the rest in proportion to the layers' preference.

    Parameters
    ----------
    tau1 : the larger, the less dispersion counts; the paper's code has one per model and budget,
        from 0.4 to 1.9, and 1 for others
    tau2 : the same for the shift; from 0.4 to 2.3
    """
    layers, heads, pages, mean = context.layers, context.heads, context.pages, context.mean
    assert context.statistics is not None  # as `observe` is there
    dispersion, shift = context.statistics.double().clamp_min(1e-30).log().unbind(dim=1)
    preference = (dispersion / tau1 + shift / tau2).softmax(dim=0)
    protected = protected_pages(context)
    won = split((mean - protected) * layers, preference, 0, pages - protected)
    return (protected + won)[:, None].repeat(1, heads)
