"""Heavy hitters of attention with Gumbel noise on its logits, over every query."""

from __future__ import annotations

import torch
from kvc_kernels.score import causal_logits

from sgl_kvc.policy.base import LayerContext
from sgl_kvc.policy.scorers._recent import put_recent_first

SOURCE = "Keyformer, arXiv 2403.09054, algorithm 1: sum of softmax((x + Gumbel) / temperature)"
PARAMETERS = {
    "temperature": {"default": 1.0, "min": 0.1, "max": 10.0},
    "recent_share": {"default": 0.3, "min": 0.0, "max": 1.0},
    "seed": {"default": 0, "min": 0, "max": 2147483647},
}
_WORD = 0xFFFFFFFF
_TABLE = 1 << 16


def observe(
    context: LayerContext, temperature: float, recent_share: float, seed: int
) -> torch.Tensor:
    """float32 [H, n], the sums so far."""
    del recent_share
    n, heads = context.length, context.heads
    sums = torch.zeros(heads, n, device=context.device)
    if context.state is not None:
        sums[:, : context.state.shape[1]] = context.state
    for first, logits in causal_logits(context.queries, context.keys, context.scale):
        logits += _gumbel(logits, first, context.layer, seed)
        sums[:, : logits.shape[-1]] += (logits / temperature).softmax(dim=-1).sum(dim=(1, 2))
    return sums


def score(
    context: LayerContext, temperature: float, recent_share: float, seed: int
) -> torch.Tensor:
    """Noisy attention summed over all queries and the query group.

    The noise follows from seed, layer, head and positions alone: a prompt scores the same
    however it is cut into chunks. The paper raises the temperature while decoding; here
    everything is scored before.

    Parameters
    ----------
    temperature : divides the noisy logits
    recent_share : share of the budget that the newest keys get
    seed : of the noise
    """
    del temperature, recent_share, seed
    return context.state


def lift(
    scores: torch.Tensor,
    kept: int,
    behind: int,
    temperature: float,
    recent_share: float,
    seed: int,
) -> None:
    """The newest keys first, as many as their share of the budget holds."""
    del temperature, seed
    put_recent_first(scores, int(recent_share * kept) - behind)


def _gumbel(like: torch.Tensor, first: int, layer: int, seed: int) -> torch.Tensor:
    """Standard Gumbel noise for logits [H, G, b, m] of the queries from position `first`.

    Every query reads one table of noise from a place of its own: far cheaper than drawing for
    every query and key.
    """
    heads, group, size, seen = like.shape
    head = torch.arange(heads * group, device=like.device) + (layer << 16)
    position = torch.arange(first, first + size, device=like.device)
    place = _mix(_mix(_mix(head + seed)[:, None] ^ position) ^ seed) % _TABLE
    word = _mix(_mix(torch.arange(_TABLE + seen, device=like.device)) ^ seed)
    uniform = ((word >> 9).float() + 0.5) / (1 << 23)  # never 0 or 1
    noise = uniform.log_().neg_().log_().neg_()
    return noise.unfold(0, seen, 1)[place].view_as(like)


def _mix(words: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser, on words held in int64."""
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _WORD
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)
