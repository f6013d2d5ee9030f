"""Attention that keys would get if the prompt were read a second time, right behind itself."""

from __future__ import annotations

import dataclasses

import torch
from kvc_kernels.repeat import leverage as key_leverage
from kvc_kernels.repeat import repeat_attention, repeat_parts
from kvc_kernels.rotary import rotate, rotation_by
from kvc_kernels.score import causal_lse, fade_to_neighbours

from sgl_kvc.policy.base import LayerContext

SOURCE = "after KVzip, arXiv 2505.23416, without its second pass; with leverage ours"
NEEDS = ("cos_sin",)
PARAMETERS = {
    "window": {"default": 64, "min": 1, "max": 1024},
    "part": {"default": 256, "min": 16, "max": 4096},
    "shift": {"default": 1024, "min": 0, "max": 1048576},
    "half_life": {"default": 0.0, "min": 0.0, "max": 1024.0},
    "leverage": {"default": 0.0, "min": 0.0, "max": 64.0},
    "echo": {"default": 0.0, "min": 0.0, "max": 64.0},
    "repeat_power": {"default": 0.0, "min": 0.0, "max": 8.0},
    "window_weight": {"default": 0.0, "min": 0.0, "max": 64.0},
}
CONTINUAL = "attention"


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a layer's queries said so far.

    Attributes
    ----------
    scores : float32 [H, m], of the parts that were read again; 0 of what was there before them.
    queries, lse : [r, H*G, D] and float32 [r, H*G], of a part that the next chunk goes on with.
    """

    scores: torch.Tensor
    queries: torch.Tensor
    lse: torch.Tensor


def observe(
    context: LayerContext,
    window: int,
    part: int,
    shift: int,
    half_life: float,
    leverage: float,
    echo: float,
    repeat_power: float,
    window_weight: float,
) -> Reading:
    """Read again the parts that this chunk completes; carry over the queries of the last one.

    Parts are counted from the prompt's first token, so scores do not depend on the chunks.
    """
    del window, half_life, leverage, echo, repeat_power, window_weight
    queries, lse = context.queries, context.lse
    if lse is None:
        lse = causal_lse(queries, context.keys, context.scale)
    if context.state is None:
        before = context.length - len(queries)  # of others, and kept in any case
        scores = [torch.zeros(context.heads, before, device=context.device)]
    else:
        earlier: Reading = context.state
        scores = [earlier.scores]
        queries, lse = torch.cat([earlier.queries, queries]), torch.cat([earlier.lse, lse])
    first, read = context.length - len(queries), len(queries)
    if not context.last_chunk:
        read = read // part * part
    if read:
        moved = rotate(queries[:read].float(), *_turn(context, shift), context.facts.neox)
        keys = context.keys[first : first + read]
        scores.append(repeat_parts(moved, keys, context.scale, lse[:read], part))
    return Reading(torch.cat(scores, dim=1), queries[read:].clone(), lse[read:].clone())


def keep(state: Reading, kept: torch.Tensor) -> Reading:
    """What was said of the `kept` keys. Nothing is carried over: a block ends with a whole part."""
    return Reading(state.scores[:, kept], state.queries, state.lse)


def score(
    context: LayerContext,
    window: int,
    part: int,
    shift: int,
    half_life: float,
    leverage: float,
    echo: float,
    repeat_power: float,
    window_weight: float,
) -> torch.Tensor:
    """The most attention any query pays that reads its part of the prompt again.

    Queries are those of the first reading, rotated on by as many positions as the second lies
    behind it.

    Parameters
    ----------
    window : last queries that are looked at, for `echo` and `window_weight`
    part : tokens that are read again at a time; a query sees no key of another part
    shift : positions by which queries are rotated on. With fewer than a part, heads that look at
        the tokens right before them would find these again
    half_life : above 0, every key counts at least what another does, halved every so many
        positions between them; 0 is off
    leverage : weight of the key's leverage, which is added: how little the head's other keys
        can stand for it
    echo : a key counts at least this many times the attention it would get if the last `window`
        tokens came once more, right behind the prompt: a question at its end, asked again
    repeat_power : all but the echo is multiplied by (the head's profile / the mean profile) to
        this power, where the model has a head profile
    window_weight : a key counts at least this many times the most attention that one of the last
        `window` queries pays it as they are, when the prompt is read for the first time
    """
    del part, shift
    reading: Reading = context.state
    scores = reading.scores
    if leverage:
        scores = scores + leverage * key_leverage(context.keys)
    weights = context.facts.head_weights(repeat_power) if repeat_power else None
    if weights is not None:
        scores = scores * weights[context.layer, context.own_heads].to(scores)[:, None]
    if echo:
        scores = scores.maximum(echo * _echo(context))
    if window_weight:
        scores = scores.maximum(window_weight * _paid(context))
    return fade_to_neighbours(scores, half_life) if half_life else scores


def _paid(context: LayerContext) -> torch.Tensor:
    """float32 [H, n]: the most attention from one of the last queries, the highest of a group."""
    most = torch.zeros(context.keys.shape[1], context.keys.shape[0], device=context.keys.device)
    for _, attention in context.causal_attention():
        seen = most[:, : attention.shape[-1]]
        torch.maximum(seen, attention.amax(dim=(1, 2)), out=seen)
    return most


def _echo(context: LayerContext) -> torch.Tensor:
    """float32 [H, n]: the most attention from the last queries, asked again after themselves."""
    asked = context.queries
    own = causal_lse(asked, context.keys[-len(asked) :], context.scale)
    moved = rotate(asked.float(), *_turn(context, len(asked)), context.facts.neox)
    return repeat_attention(moved, context.keys, context.scale, own)


def _turn(context: LayerContext, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [R/2] of the rotation by `shift` positions."""
    assert context.facts.cos_sin is not None
    cos, sin = rotation_by(context.facts.cos_sin, shift)
    return cos.to(context.device), sin.to(context.device)
