"""Copy the kept KVs of a request into the head pages of its segment."""

from __future__ import annotations

import torch

from kvc_kernels.dispatch import use_triton


def compact(
    arena_k: torch.Tensor,
    arena_v: torch.Tensor,
    source_slots: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    """Fill `target_blocks` of both arenas with the kept keys and values of every head.

    Parameters
    ----------
    arena_k, arena_v : [num_blocks, L, H, P, D] and [num_blocks, L, H, P, Dv]; `target_blocks`
        of them are overwritten.
    source_slots : integer [S], the slot (``block * P + offset``) of every position.
    positions : int64 [len(target_blocks) * L * H * P], kept positions as
        `kept_positions` gives them.
    pages : int64 [L * H], pages of every head, summing to ``len(target_blocks) * L * H``.
    target_blocks : int64 [n], not among the source's blocks.
    """
    if use_triton(arena_k):
        from kvc_kernels.gpu import compact as gpu

        gpu.compact(arena_k, arena_v, source_slots, positions, pages, target_blocks)
        return
    layers, heads, page_size = arena_k.shape[1:4]
    per_block = layers * heads
    head = torch.repeat_interleave(
        torch.arange(per_block), pages * page_size, output_size=len(positions)
    )
    slots = source_slots[positions].long()
    page = slots // page_size * per_block + head
    for arena in (arena_k, arena_v):
        move(arena, page, slots % page_size, target_blocks)


def move(
    arena: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    target_blocks: torch.Tensor,
    *,
    in_place: bool = False,
) -> None:
    """Fill `target_blocks` of `arena` with single KVs, in the order of the blocks' memory.

    Parameters
    ----------
    arena : [num_blocks, L, H, P, ...]; `target_blocks` of it are overwritten.
    page, offset : int64 [len(target_blocks) * L * H * P], the head page (in the flat view
        [num_blocks * L * H, P, ...]) and the offset in it that each KV is taken from.
    target_blocks : int64 [n], not among the sources.
    in_place : they may be. Then all that is moved lies outside the arena for a moment.
    """
    if use_triton(arena) and not in_place:
        from kvc_kernels.gpu import compact as gpu

        gpu.move(arena, page, offset, target_blocks)
        return
    arena[target_blocks] = arena.flatten(0, 2)[page, offset].view(-1, *arena.shape[1:])


def compact_reference(
    arena: torch.Tensor,
    source_slots: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    """`compact` of one arena, one KV at a time."""
    _, layers, heads, page_size, _ = arena.shape
    source = arena.clone()
    written = 0
    for head, count in enumerate(pages.tolist()):
        for _ in range(count * page_size):
            slot = int(source_slots[positions[written]])
            page, offset = divmod(written, page_size)
            block = int(target_blocks[page // (layers * heads)])
            target = arena[block].view(layers * heads, page_size, -1)
            origin = source[slot // page_size].view(layers * heads, page_size, -1)
            target[page % (layers * heads), offset] = origin[head, slot % page_size]
            written += 1
