"""The most attended keys, and some of the others that stand for the rest."""

from __future__ import annotations

import torch
from kvc_kernels.score import put_first, put_last_first

from sgl_kvc.policy.base import LayerContext

SOURCE = "KVCrush, arXiv 2503.00022: representatives by Hamming distance of head behaviour"
PARAMETERS = {
    "window": {"default": 16, "min": 1, "max": 1024},
    "representatives": {"default": 0.25, "min": 0.0, "max": 1.0},
    "anchor": {"default": "alternate", "choices": ["alternate", "zeros", "ones"]},
}


def score(
    context: LayerContext, window: int, representatives: float, anchor: str
) -> torch.Tensor:
    """Attention, with the keys first that are important or represent others.

    A key's behaviour is one bit for every KV head of the layer: whether it is in the more attended
    half of the head's keys. The keys that a head does not find important are sorted by the Hamming
    distance of their behaviour to one anchor, and taken at even steps.

    Parameters
    ----------
    window : last queries that are looked at; their own keys come first, up to a quarter of the
        budget
    representatives : share of the budget
    anchor : what behaviour is compared to: bits that alternate from head to head, or of a key that
        no head attends to (zeros), or all do (ones)
    """
    del window
    own, n, heads = context.queries.shape[0], context.length, context.heads
    attention = context.window_attention() / (own * context.queries.shape[1] // heads)
    kept = min(context.kept, n)
    standing = int(representatives * kept)
    ranked = put_last_first(attention, context.forced).sort(dim=-1, descending=True, stable=True)
    important = torch.zeros_like(attention, dtype=torch.bool)
    important.scatter_(1, ranked.indices[:, : kept - standing], True)
    distance = _distance(attention, anchor).expand(heads, n)
    others = distance.masked_fill(important, heads + 1).sort(dim=-1, stable=True).indices
    last = n - (kept - standing) - 1
    even = torch.arange(standing, device=attention.device) * last // max(1, standing - 1)
    chosen = important.scatter(1, others[:, even], True)
    return put_first(attention, chosen)


def _distance(attention: torch.Tensor, anchor: str) -> torch.Tensor:
    """int64 [n], Hamming distance of every key's behaviour to the anchor."""
    heads, n = attention.shape
    halves = attention.sort(dim=-1, descending=True, stable=True).indices[:, : n // 2]
    behaviour = torch.zeros_like(attention, dtype=torch.bool).scatter_(1, halves, True)
    if anchor == "alternate":
        bits = torch.arange(heads, device=attention.device) % 2 == 1
    else:
        bits = torch.full((heads,), anchor == "ones", device=attention.device)
    return (behaviour != bits[:, None]).sum(dim=0)
