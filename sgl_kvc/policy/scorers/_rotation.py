"""Rotary embedding for scorers that undo it or move it on."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import ModelFacts


def angles(
    facts: ModelFacts, positions: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines at `positions` (int64 [n]): float32 [n, R/2]."""
    table = facts.cos_sin
    assert table is not None
    cos, sin = table[positions.to(table.device)].to(device).float().chunk(2, dim=-1)
    return cos, sin


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """Rotate the first R of D dims of [..., D] by cosines and sines [..., R/2]."""
    rotated = 2 * cos.shape[-1]
    turned, rest = states[..., :rotated], states[..., rotated:]
    if neox:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)
