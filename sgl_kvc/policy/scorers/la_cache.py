"""A ladder: every layer keeps other places of the prompt, the fewer the older they are."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext

SOURCE = "LaCache, arXiv 2507.14204: ladder pattern and iterative compaction"
PARAMETERS = {
    "span": {"default": 0.5, "min": 0.01, "max": 1.0},
    "overlap": {"default": 0.0, "min": 0.0, "max": 0.99},
}


def score(context: LayerContext, span: float, overlap: float) -> torch.Tensor:
    """Positions on the ladder first; on it and off it, the newest first.

    A pass goes over the prompt from the oldest position after the sinks, as far as the budget
    demands, and leaves of every period of positions those on the layer's rung. Passes follow until
    the rest is within the budget, so what is old is thinned out again and again.

    Parameters
    ----------
    span : share of the layers that keep a position
    overlap : share of these that keep the next position too
    """
    n, heads = context.length, context.heads
    left = torch.arange(n, device=context.device)
    period, rung = _ladder(context.layers, span, overlap)
    offsets = torch.arange(rung, device=left.device) + context.layer % (period - rung + 1)
    sinks = min(context.spec.sinks, n)
    while len(left) > context.kept and period > rung:
        needed = -(-(len(left) - context.kept) // (period - rung))
        periods = min(needed, (len(left) - sinks) // period)
        if not periods:
            break
        end = sinks + periods * period
        on_it = left[sinks:end].view(periods, period)[:, offsets].flatten()
        left = torch.cat([left[:sinks], on_it, left[end:]])
    newest = torch.arange(n, device=left.device, dtype=torch.float32)
    return newest.index_add(0, left, torch.full_like(left, n, dtype=torch.float32)).expand(heads, n)


def _ladder(layers: int, span: float, overlap: float) -> tuple[int, int]:
    """Positions of a period, and how many of them a layer keeps; as many if there is no ladder."""
    held = max(1, round(span * layers))
    moved = held - min(held - 1, round(overlap * held))
    period = 1 + -(-(layers - held) // moved)
    return period, min(-(-held // moved), period)
