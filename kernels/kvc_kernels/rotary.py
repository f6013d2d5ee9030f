"""Rotary embeddings of every kind, from the table of cosines and sines a model was loaded with.

A table is [positions, R]: the cosines, then the sines, of R/2 angles; the first R of D dims are
rotated. Llama 3's scaling changes the angles alone; YaRN also multiplies cosines and sines by an
attention factor, so that a state becomes longer as it is rotated.
"""

from __future__ import annotations

import torch


def angles(
    table: torch.Tensor, positions: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a table at `positions` (int64 [n]), on `device`: float32 [n, R/2]."""
    cos, sin = table[positions.to(table.device)].to(device).float().chunk(2, dim=-1)
    return cos, sin


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """Rotate the first R of D dims of [..., D] by cosines and sines [..., R/2].

    Parameters
    ----------
    neox : whether dim i is paired with i + R/2 (else 2i with 2i + 1).
    """
    rotated = 2 * cos.shape[-1]
    turned, rest = states[..., :rotated], states[..., rotated:]
    if neox:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


def rotation_by(table: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [R/2], float32, that move a rotated state `shift` positions further on.

    Lengths stay as they are: what multiplies the table's entries (YaRN's attention factor) is
    divided out. Positions may pass the table's end, since rotations by parts of the way, one
    after the other, are the rotation by the whole.

    Parameters
    ----------
    table : [positions, R], at least 2 positions.
    shift : at least 0.
    """
    half, last = table.shape[1] // 2, table.shape[0] - 1
    times, rest = divmod(shift, last)
    ends = torch.stack((table[rest], table[last])).double()
    turns = torch.complex(ends[:, :half], ends[:, half:])
    turns = turns / turns.abs()
    turn = turns[0] * turns[1] ** times
    return turn.real.float(), turn.imag.float()
