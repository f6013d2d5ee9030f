"""Logits that queries around their centre, before rotation, would have at distances to come."""

from __future__ import annotations

import dataclasses

import torch
from kvc_kernels.rotary import angles, rotate

from sgl_kvc.policy.base import HeldContext, LayerContext
from sgl_kvc.policy.facts import ModelFacts

SOURCE = "TriAttention, arXiv 2604.04921: trigonometric series of the distance plus norms"
NEEDS = ("cos_sin",)
PARAMETERS = {
    "furthest": {"default": 65536, "min": 1, "max": 1048576},
}
CONTINUAL = "rescored"


@dataclasses.dataclass(frozen=True)
class Centre:
    """Of a layer's queries before rotation, summed; R / 2 pairs of dims are rotated together.

    Attributes
    ----------
    count : queries so far.
    total : float32 [H*G, D].
    sizes : float32 [H*G, R / 2], the sum of the pairs' norms.
    """

    count: int
    total: torch.Tensor
    sizes: torch.Tensor


def observe(context: LayerContext, furthest: int) -> Centre:
    """The sums with one more chunk."""
    del furthest
    (new, query_heads, dim), n = context.queries.shape, context.length
    assert context.facts.cos_sin is not None
    cos, sin = angles(context.facts.cos_sin, torch.arange(n - new, n), context.device)
    length = cos**2 + sin**2  # not 1 where a long-context variant scales the rotation
    queries = context.queries.float().transpose(0, 1)
    queries = rotate(queries, cos / length, -sin / length, context.facts.neox)
    sizes = _sizes(queries, context.facts).sum(dim=1)
    seen = context.state or Centre(0, queries.new_zeros(query_heads, dim), torch.zeros_like(sizes))
    return Centre(seen.count + new, seen.total + queries.sum(dim=1), seen.sizes + sizes)


def score(context: LayerContext, furthest: int) -> torch.Tensor:
    """The mean over the distances, normalised over a query head's keys; the largest of the group.

    Parameters
    ----------
    furthest : distances are 1, 2, 4, ... up to this, from behind the last key
    """
    keys = context.keys.transpose(0, 1)
    held = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
    return _scores(keys, held, context.length, context.state, context.facts, furthest)


def rescore(context: HeldContext, furthest: int) -> torch.Tensor:
    """The same of what a head holds in decode, by the prompt's queries."""
    if context.state is None:  # nothing of the prompt was scored: the newest
        return torch.arange(context.held.shape[1], device=context.held.device).expand(
            context.held.shape
        ) * 1.0
    return _scores(
        context.keys, context.held, context.length, context.state, context.facts, furthest
    )


def _scores(
    keys: torch.Tensor,
    held: torch.Tensor,
    position: int,
    centre: Centre,
    facts: ModelFacts,
    furthest: int,
) -> torch.Tensor:
    """float32 [H, n] of keys [H, n, D] for queries at a `position` and behind it.

    A key keeps its rotation, so the series in the distance is a product with the centre, rotated to
    where a query would be; rotations are linear, so their mean over the distances will do.
    """
    heads, n = held.shape
    keys, count = keys.float(), max(1, centre.count)
    first = torch.tensor([0, 1])
    assert facts.cos_sin is not None
    cos, sin = angles(facts.cos_sin, first, keys.device)
    size = (cos[0] ** 2 + sin[0] ** 2).sqrt()  # of the rotation: 1, or a long-context variant's
    turn = torch.atan2(sin[1], cos[1]).double() - torch.atan2(sin[0], cos[0]).double()
    distances = 2.0 ** torch.arange(furthest.bit_length(), device=keys.device, dtype=torch.float64)
    ahead = (position + distances)[:, None] * turn
    cos, sin = (size * part.mean(dim=0).float() for part in (ahead.cos(), ahead.sin()))
    mean = centre.total / count
    centre_ahead = rotate(mean[:, None], cos, sin, facts.neox)[:, 0]
    # What the queries' lengths have beyond that of their mean counts by the key's length alone.
    beyond = (centre.sizes / count - _sizes(mean[:, None], facts)[:, 0]) * size
    shape = (heads, -1, n)
    series = keys @ centre_ahead.view(heads, -1, keys.shape[-1]).transpose(1, 2)
    lengths = _sizes(keys, facts) @ beyond.view(heads, -1, len(size)).transpose(1, 2)
    scores = (series + lengths).transpose(1, 2).reshape(shape)
    there = held[:, None].float()
    number = there.sum(dim=-1, keepdim=True).clamp(min=1)
    scores = scores - (scores * there).sum(dim=-1, keepdim=True) / number
    spread = ((scores.square() * there).sum(dim=-1, keepdim=True) / number).sqrt()
    return (scores / spread.clamp(min=1e-6)).amax(dim=1)


def _sizes(states: torch.Tensor, facts: ModelFacts) -> torch.Tensor:
    """Norms of the pairs of dims that are rotated together: [..., D] -> [..., R / 2]."""
    assert facts.cos_sin is not None
    turned = states[..., : facts.cos_sin.shape[-1]]
    if facts.neox:
        return torch.hypot(*turned.chunk(2, dim=-1))
    return torch.hypot(turned[..., ::2], turned[..., 1::2])
