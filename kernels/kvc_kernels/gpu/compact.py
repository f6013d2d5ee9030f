"""Copy kept KVs into the head pages of a segment, bit by bit: cf. `kvc_kernels.compact`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

#: Words of 8 bytes that a program holds at a time.
_TILE = 2048


@triton.jit
def _copy_rows(
    arena, source_page, offset, target_page, row,
    P: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy the KVs at (`source_page`, `offset`) to the rows of one target page."""
    word = tl.arange(0, WIDTH)
    valid = (word < WORDS)[None, :]
    source = arena + (source_page * P + offset) * WORDS
    kept = tl.load(source[:, None] + word[None, :], mask=valid)
    target = arena + (target_page * P + row) * WORDS
    tl.store(target[:, None] + word[None, :], kept, mask=valid)


@triton.jit
def _compact_kernel(
    arena_k, arena_v, source_slots, positions, page_end, target_blocks,
    PER_BLOCK: tl.constexpr, ALL_HEADS: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, WIDTH: tl.constexpr, WORDS_V: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    """One program fills one head page of keys and of values."""
    page = tl.program_id(0).to(tl.int64)
    target = tl.load(target_blocks + page // PER_BLOCK) * PER_BLOCK + page % PER_BLOCK
    each = tl.arange(0, ALL_HEADS)  # the page's head: as many as end at or before it
    end = tl.load(page_end + each, mask=each < PER_BLOCK, other=0)
    head = tl.sum(((end <= page) & (each < PER_BLOCK)).to(tl.int32))
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)
        slot = tl.load(source_slots + tl.load(positions + page * P + row)).to(tl.int64)
        source, offset = slot // P * PER_BLOCK + head, slot % P
        _copy_rows(arena_k, source, offset, target, row, P, WORDS, WIDTH)
        _copy_rows(arena_v, source, offset, target, row, P, WORDS_V, WIDTH_V)


@triton.jit
def _move_kernel(
    arena, source_page, source_offset, target_blocks,
    PER_BLOCK: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program fills one head page."""
    page = tl.program_id(0).to(tl.int64)
    target = tl.load(target_blocks + page // PER_BLOCK) * PER_BLOCK + page % PER_BLOCK
    for start in range(0, P, ROWS):
        row = start + tl.arange(0, ROWS)
        source = tl.load(source_page + page * P + row)
        offset = tl.load(source_offset + page * P + row)
        _copy_rows(arena, source, offset, target, row, P, WORDS, WIDTH)


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
    arena_k, arena_v : [num_blocks, L, H, P, D] and [num_blocks, L, H, P, Dv], contiguous;
        `target_blocks` of them are overwritten.
    source_slots : int64 or int32 [S], the slot (``block * P + offset``) of every position.
    positions : int64 [len(target_blocks) * L * H * P], kept positions as
        `kept_positions` gives them.
    pages : int64 [L * H], pages of every head, summing to ``len(target_blocks) * L * H``.
    target_blocks : int64 [n], not among the source's blocks.

    Raises
    ------
    ValueError : on shapes or types that do not fit together.
    """
    layers, heads, page_size = arena_k.shape[1:4]
    per_block = layers * heads
    if arena_v.shape[:-1] != arena_k.shape[:-1]:
        raise ValueError("arena_k and arena_v differ in blocks, layers, heads or page size")
    if source_slots.dtype not in (torch.int32, torch.int64) or not source_slots.is_contiguous():
        raise ValueError(f"source_slots are {source_slots.dtype}; contiguous int64 or int32 needed")
    programs = len(target_blocks) * per_block
    _check_index("positions", positions, programs * page_size)
    _check_index("pages", pages, per_block)
    _check_index("target_blocks", target_blocks, len(target_blocks))
    words_k, words_v = _words(arena_k), _words(arena_v)
    width_k, width_v = (triton.next_power_of_2(words.shape[-1]) for words in (words_k, words_v))
    if programs == 0:
        return
    _compact_kernel[(programs,)](
        words_k, words_v, source_slots, positions, pages.cumsum(0), target_blocks,
        PER_BLOCK=per_block, ALL_HEADS=triton.next_power_of_2(per_block),
        P=page_size, ROWS=_rows(page_size, max(width_k, width_v)),
        WORDS=words_k.shape[-1], WIDTH=width_k, WORDS_V=words_v.shape[-1], WIDTH_V=width_v,
    )  # fmt: skip


def move(
    arenas: torch.Tensor | Iterable[torch.Tensor],
    page: torch.Tensor,
    offset: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    """Fill `target_blocks` of each arena with single KVs, in the order of the blocks' memory.

    Parameters
    ----------
    arenas : one or several [num_blocks, L, H, P, D] or, like the metric, [num_blocks, L, H, P],
        contiguous; `target_blocks` of them are overwritten.
    page, offset : int64 [len(target_blocks) * L * H * P], the head page (in the flat view
        [num_blocks * L * H, P, ...]) and the offset in it that each KV is taken from.
    target_blocks : int64 [n], not among the sources.

    Raises
    ------
    ValueError : on shapes or types that do not fit together.
    """
    for arena in (arenas,) if isinstance(arenas, torch.Tensor) else arenas:
        layers, heads, page_size = arena.shape[1:4]
        programs = len(target_blocks) * layers * heads
        _check_index("page", page, programs * page_size)
        _check_index("offset", offset, programs * page_size)
        _check_index("target_blocks", target_blocks, len(target_blocks))
        words = _words(arena if arena.dim() == 5 else arena[..., None])
        width = triton.next_power_of_2(words.shape[-1])
        if programs == 0:
            continue
        _move_kernel[(programs,)](
            words, page, offset, target_blocks,
            PER_BLOCK=layers * heads, P=page_size, ROWS=_rows(page_size, width),
            WORDS=words.shape[-1], WIDTH=width,
        )  # fmt: skip


def _words(arena: torch.Tensor) -> torch.Tensor:
    """The same memory in the widest integers that divide a KV: a copy knows no types."""
    if arena.dim() != 5 or not arena.is_contiguous():
        raise ValueError(f"{list(arena.shape)} is not a contiguous [num_blocks, L, H, P, D]")
    row = arena.shape[-1] * arena.element_size()
    types = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return arena.view(next(word for word in types if row % word.itemsize == 0))


def _rows(page_size: int, width: int) -> int:
    """KVs of a page that a program copies at a time."""
    return min(page_size, max(1, _TILE // width))


def _check_index(name: str, index: torch.Tensor, length: int) -> None:
    """Raise ValueError unless `index` is int64, contiguous and of that length."""
    if index.dtype != torch.int64 or index.shape != (length,) or not index.is_contiguous():
        raise ValueError(
            f"{name} is {index.dtype} {list(index.shape)}, not contiguous int64 [{length}]"
        )
