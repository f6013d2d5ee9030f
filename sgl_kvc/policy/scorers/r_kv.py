"""Attention of the last queries, mixed with how little a key repeats others of its head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kvc_kernels.score import block_elements, causal_logits, pool_neighbours

from sgl_kvc.policy.base import HeldContext, LayerContext

SOURCE = "R-KV, arXiv 2505.24133, section 3: lambda * importance - (1 - lambda) * redundancy"
PARAMETERS = {
    "window": {"default": 8, "min": 1, "max": 1024},
    "pool": {"default": 7, "min": 1, "max": 255, "step": 2},
    "importance": {"default": 0.1, "min": 0.0, "max": 1.0},
    "threshold": {"default": 0.5, "min": 0.0, "max": 1.0},
}
CONTINUAL = "rescored"


def score(
    context: LayerContext, window: int, pool: int, importance: float, threshold: float
) -> torch.Tensor:
    """Importance minus redundancy, each of them a share of one.

    Importance: the largest logit of the query group, as a softmax over the keys before the
    window, averaged over the window and pooled. The window's own keys, which `spec.recent` keeps,
    count by their attention.

    Parameters
    ----------
    window : last queries that are looked at; in decode too, before keys are chosen again
    pool : width of the pool over neighbouring keys, odd; the largest counts; 1 is none
    importance : weight of the attention against that of redundancy (the paper's lambda)
    threshold : keys of a larger cosine similarity repeat each other; the last of those that a key
        is similar to is not held against that one
    """
    del window
    own, n = context.queries.shape[0], context.length
    before = n - own
    attention = context.window_attention(group="mean") / own
    largest = torch.zeros_like(attention[:, :before])
    for _, logits in causal_logits(context.queries, context.keys, context.scale):
        largest += logits[..., :before].amax(dim=1).softmax(dim=-1).sum(dim=1) / own
    attention[:, :before] = pool_neighbours(largest, pool)
    keys = context.keys.transpose(0, 1)
    held = torch.ones_like(attention, dtype=torch.bool)
    return importance * attention - (1 - importance) * _redundancy(keys, held, threshold)


def rescore(
    context: HeldContext, window: int, pool: int, importance: float, threshold: float
) -> torch.Tensor:
    """The same of what a head holds in decode, by the attention of the last queries there."""
    del window
    attention = context.attention * context.held
    attention = attention / attention.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    redundancy = _redundancy(context.keys, context.held, threshold)
    return importance * pool_neighbours(attention, pool) - (1 - importance) * redundancy


def _redundancy(keys: torch.Tensor, held: torch.Tensor, threshold: float) -> torch.Tensor:
    """Softmax of a key's mean cosine similarity to the others: float32 [H, n].

    For each key the last one that it is similar to is left out: of keys that repeat each other
    the newest stays.

    Parameters
    ----------
    keys : [H, n, D].
    held : bool [H, n], which of them count.
    """
    heads, n = held.shape
    unit = F.normalize(keys.float(), dim=-1) * held[..., None]
    columns = unit.transpose(1, 2)
    positions = torch.arange(n, device=keys.device, dtype=torch.int32)
    left_out = torch.zeros(heads, n, device=keys.device)
    step = max(1, block_elements(keys) // (heads * n))
    for begin in range(0, n, step):
        similar = unit[:, begin : begin + step] @ columns  # [H, b, n]
        similar.diagonal(begin, dim1=1, dim2=2).zero_()
        last = torch.where(similar > threshold, positions, -1).amax(dim=-1).long()
        column = last.clamp(min=0)
        value = similar.gather(2, column[..., None])[..., 0]
        left_out.scatter_add_(1, column, torch.where(last >= 0, value, 0))
    # The sum of a column of similarities is a product with the sum of all keys.
    total = (unit @ unit.sum(dim=1)[..., None])[..., 0] - unit.square().sum(dim=-1) - left_out
    mean = total / held.sum(dim=-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~held, float("-inf")).softmax(dim=-1)
