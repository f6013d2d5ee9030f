"""Compaction in one launch against the reference: the same bits, whatever their type."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.compact import compact_reference
from kvc_kernels.gpu.compact import compact, move

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


def _arena(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Any bits, NaN of every kind among them."""
    size = dtype.itemsize
    numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return numbers.view(dtype).to(device)


def _bits(arena: torch.Tensor) -> torch.Tensor:
    return arena.view(torch.uint8)


def _request(page: int, pages: list[int], slot_type: torch.dtype, device: str):
    """Slots of 5 of 12 blocks, and any positions for `pages` of each head."""
    source = torch.tensor([7, 2, 9, 4, 11])
    slots = (source[:, None] * page + torch.arange(page)).flatten()
    kept = [torch.randperm(5 * page)[: count * page].sort().values for count in pages]
    return slots.to(slot_type).to(device), torch.cat(kept).to(device)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("page", "dim", "dim_v", "slot_type"),
    [(8, 16, 16, torch.int32), (8, 96, 64, torch.int64), (16, 64, 128, torch.int32)],
)
def test_compact(device, dtype, page, dim, dim_v, slot_type):
    """Two layers of three heads; heads without a page at the front, inside and at the end."""
    torch.manual_seed(0)
    for pages in ([1, 3, 2, 1, 4, 1], [0, 5, 0, 0, 1, 0], [0, 0, 2, 5, 5, 0]):
        blocks = sum(pages) // 6
        slots, positions = _request(page, pages, slot_type, device)
        arenas = [_arena((12, 2, 3, page, size), dtype, device) for size in (dim, dim_v)]
        target = torch.tensor([5, 1, 8], device=device)[:blocks]
        expected = [_bits(arena).clone() for arena in arenas]
        counts = torch.tensor(pages, device=device)
        for bits in expected:
            compact_reference(bits, slots, positions, counts, target)
        compact(*arenas, slots, positions, counts, target)
        for arena, bits in zip(arenas, expected, strict=True):
            assert _bits(arena).equal(bits)


@pytest.mark.parametrize(("dim", "page"), [(128, 32), (256, 64), (16, 8)])
def test_pages_larger_than_what_is_held_at_a_time(device, dim, page):
    arenas = [_arena((6, 1, 2, page, size), torch.float32, device) for size in (dim, 32)]
    slots = torch.arange(page, 4 * page, device=device)
    positions = torch.cat([torch.randperm(3 * page)[:page].sort().values for _ in range(2)])
    counts, target = torch.tensor([1, 1], device=device), torch.tensor([5], device=device)
    expected = [_bits(arena).clone() for arena in arenas]
    for bits in expected:
        compact_reference(bits, slots, positions.to(device), counts, target)
    compact(*arenas, slots, positions.to(device), counts, target)
    for arena, bits in zip(arenas, expected, strict=True):
        assert _bits(arena).equal(bits)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_move(device, dtype):
    torch.manual_seed(0)
    layers, heads, page = 2, 3, 8
    arena_k = _arena((9, layers, heads, page, 16), dtype, device)
    arena_v = _arena((9, layers, heads, page, 96), dtype, device)
    metric = torch.rand(9, layers, heads, page, device=device)
    target = torch.tensor([8, 0], device=device)
    n = len(target) * layers * heads * page
    source = torch.randint(6, 8 * 6, (n,), device=device)  # of blocks 1 to 7
    offset = torch.randint(0, page, (n,), device=device)
    arenas = (arena_k, arena_v, metric)
    expected = [_bits(arena[..., None] if arena is metric else arena).clone() for arena in arenas]
    for bits in expected:
        bits[target] = bits.flatten(0, 2)[source, offset].view(-1, *bits.shape[1:])
    move(arenas, source, offset, target)
    for arena, bits in zip(arenas, expected, strict=True):
        assert _bits(arena).flatten().equal(bits.flatten())
    before = arena_v.clone()
    move(arena_v, source.flip(0), offset, target)
    move([before], source.flip(0), offset, target)
    assert _bits(arena_v).equal(_bits(before)), "one arena as a list of one"


def test_nothing_to_copy(device):
    arena = torch.ones(3, 1, 2, 8, 16, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    pages = torch.zeros(2, dtype=torch.int64, device=device)
    compact(arena, arena, none, none, pages, none)
    move(arena, none, none, none)
    assert arena.eq(1).all()


def test_what_does_not_fit_is_refused(device):
    arena = torch.zeros(3, 1, 2, 8, 16, device=device)
    slots, positions = torch.arange(8, device=device), torch.arange(16, device=device) // 2
    pages, target = torch.tensor([1, 1], device=device), torch.tensor([2], device=device)
    with pytest.raises(ValueError, match="differ"):
        compact(arena, arena[:2], slots, positions, pages, target)
    with pytest.raises(ValueError, match="not a contiguous"):
        compact(arena, arena[..., ::2], slots, positions, pages, target)
    with pytest.raises(ValueError, match="positions is"):
        compact(arena, arena, slots, positions[1:], pages, target)
    with pytest.raises(ValueError, match="pages is"):
        compact(arena, arena, slots, positions, pages.int(), target)
    with pytest.raises(ValueError, match="offset is"):
        move(arena, positions, positions[1:], target)
