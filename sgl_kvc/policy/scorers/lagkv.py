"""Keys and values that stand out beside the part of the prompt that follows them."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext

SOURCE = (
    "LagKV, arXiv 2504.04704, section 3: spread of (k - min) / (max - min) over channels, min "
    "and max over the next part"
)
PARAMETERS = {
    "lag": {"default": 128, "min": 2, "max": 4096},
}


def score(context: LayerContext, lag: int) -> torch.Tensor:
    """The rank of a key within its part of the prompt, by spread relative to the next part.

    The prompt after `spec.sinks` is cut into parts of `lag` tokens. Sinks, the last whole part
    and what follows it come first; so do the newest keys of a prompt of fewer than two parts.

    Parameters
    ----------
    lag : tokens in a part
    """
    n, heads = context.length, context.heads
    newest = torch.arange(n, device=context.device, dtype=torch.float32) / n
    scores = 1 + newest.repeat(heads, 1)
    begin = min(context.spec.sinks, n)
    scored = (n - begin) // lag - 1
    if scored < 1:
        return scores
    spread = _spread(context.keys[begin:], lag, scored)
    spread += _spread(context.values[begin:], lag, scored)
    rank = spread.argsort(dim=-1, stable=True).argsort(dim=-1)
    scores[:, begin : begin + scored * lag] = rank.flatten(1) / lag
    return scores


def _spread(states: torch.Tensor, lag: int, scored: int) -> torch.Tensor:
    """[H, scored, lag]: standard deviation over channels, each channel scaled to the range it
    has in the part after, as a softmax over the part."""
    parts = states[: (scored + 1) * lag].float().unflatten(0, (scored + 1, lag))
    low, high = parts[1:].amin(dim=1, keepdim=True), parts[1:].amax(dim=1, keepdim=True)
    scaled = (parts[:-1] - low) / (high - low).clamp(min=1e-12)
    return scaled.std(dim=-1).permute(2, 0, 1).softmax(dim=-1)
