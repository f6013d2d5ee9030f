"""Attention that future queries, distributed as the prompt's, will pay."""

from __future__ import annotations

import dataclasses

import torch
from kvc_kernels.rotary import angles, rotate
from kvc_kernels.score import block_elements

from sgl_kvc.policy.base import LayerContext

SOURCE = "Expected Attention, arXiv 2510.00636: exp(mean k / sqrt(D) + k cov k / 2D), times |v|"
NEEDS = ("cos_sin",)
PARAMETERS = {
    "future": {"default": 512, "min": 1, "max": 8192},
    "covariance": {"default": True, "choices": [True, False]},
    "value_norm": {"default": True, "choices": [True, False]},
    "epsilon": {"default": 0.0, "min": 0.0, "max": 1.0},
}


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of a layer's queries before rotation.

    Attributes
    ----------
    count : queries so far.
    mean : float32 [H*G, D].
    scatter : float32 [H*G, D, D], the sum of outer products around the mean.
    """

    count: int
    mean: torch.Tensor
    scatter: torch.Tensor


def observe(
    context: LayerContext, future: int, covariance: bool, value_norm: bool, epsilon: float
) -> Statistics:
    """The statistics with one more chunk; the first `spec.sinks` queries are outliers."""
    del future, covariance, value_norm, epsilon
    new, n = context.queries.shape[0], context.length
    earlier = context.state or _nothing(context.queries)
    first = max(n - new, min(context.spec.sinks, n))
    queries = context.queries[new - (n - first) :].float()
    if not len(queries):
        return earlier
    assert context.facts.cos_sin is not None
    cos, sin = angles(context.facts.cos_sin, torch.arange(first, n), queries.device)
    length = cos**2 + sin**2  # not 1 where a long-context variant scales the rotation
    queries = rotate(queries.transpose(0, 1), cos / length, -sin / length, context.facts.neox)
    mean = queries.mean(dim=1)
    centred = queries - mean[:, None]
    count = earlier.count + len(cos)
    apart = mean - earlier.mean
    weight = earlier.count * len(cos) / count
    return Statistics(
        count,
        earlier.mean + apart * (len(cos) / count),
        earlier.scatter
        + centred.transpose(1, 2) @ centred
        + weight * apart[:, :, None] * apart[:, None, :],
    )


def score(
    context: LayerContext, future: int, covariance: bool, value_norm: bool, epsilon: float
) -> torch.Tensor:
    """Softmax of the expected logits, averaged over the query group, times the value's norm.

    Parameters
    ----------
    future : positions after the prompt over which the rotation is averaged
    covariance : whether the queries' covariance counts, besides their mean
    value_norm : whether scores are multiplied by the norm of the key's value
    epsilon : added to the expected attention before that
    """
    n, heads, dim = context.keys.shape
    mean, spread = _future(context, future)
    keys = context.keys.float().transpose(0, 1)  # [H, n, D]
    logits = mean.view(heads, -1, dim) @ keys.transpose(1, 2) * context.scale  # [H, G, n]
    if covariance:
        spread = spread.view(heads, -1, dim, dim) * (context.scale**2 / 2)
        step = max(1, block_elements(spread) // spread[..., 0].numel())
        for begin in range(0, n, step):
            part = keys[:, None, begin : begin + step]  # [H, 1, b, D]
            logits[..., begin : begin + step] += ((part @ spread) * part).sum(dim=-1)
    sinks = context.spec.sinks
    if sinks < n:
        logits[..., :sinks] = float("-inf")
    scores = logits.softmax(dim=-1).mean(dim=1)
    return (scores + epsilon) * context.values.float().norm(dim=-1).T if value_norm else scores


def _future(context: LayerContext, future: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [H*G, D] and covariance [H*G, D, D] of queries at the positions to come."""
    assert context.facts.cos_sin is not None
    n = context.length
    known = context.facts.cos_sin.shape[0]
    first = min(n, known - 1)
    ahead = torch.arange(first, min(first + future, known))
    cos, sin = angles(context.facts.cos_sin, ahead, context.device)
    cos, sin, neox = cos.mean(dim=0), sin.mean(dim=0), context.facts.neox
    seen = context.state
    spread = seen.scatter / max(seen.count, 1)
    for _ in range(2):  # rotate columns, then rows
        spread = rotate(spread, cos, sin, neox).transpose(1, 2)
    return rotate(seen.mean, cos, sin, neox), spread


def _nothing(queries: torch.Tensor) -> Statistics:
    heads, dim = queries.shape[1:]
    zeros = torch.zeros(heads, dim, dim, device=queries.device)
    return Statistics(0, zeros[..., 0].clone(), zeros)
