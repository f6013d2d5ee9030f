"""Write new KVs into their slots."""

from __future__ import annotations

import torch


def store(layer_arena: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Write `new` ([n, H, D]) at `slots` ([n]) of one layer's view [num_blocks, H, P, D]."""
    page_size = layer_arena.shape[2]
    layer_arena[slots // page_size, :, slots % page_size] = new
