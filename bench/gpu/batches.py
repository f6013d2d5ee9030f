"""Ragged batches of spans at real sizes, built on the device."""

from __future__ import annotations

import dataclasses

import torch
from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache, Spans


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A batch, and how many KVs every head has.

    Attributes
    ----------
    held : int64 [B, L, H], KVs of every head.
    """

    batch: Batch
    held: torch.Tensor


def build(
    segments: list[int],
    tails: list[int],
    shared: list[int] | None = None,
    *,
    layers: int,
    heads: int,
    page: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    sigma: float = 1.0,
) -> Ragged:
    """Requests of ``segments[b]`` own blocks (0: not compressed) and ``tails[b]`` tokens.

    Before them are ``shared[b]`` canonical blocks (none). Heads have at least a page of a segment;
    `sigma` is the deviation of the logarithms of how many.
    """
    torch.manual_seed(0)
    per_block, shared = layers * heads, shared or [0] * len(segments)
    ranges = []  # of every request where shared, own and tail begin, and how many blocks they have
    for whole, own, tail in zip(shared, segments, tails, strict=True):
        begin = whole * page + (page if own else 0)  # compressed rows release a block's positions
        ranges.append([(0, whole), (begin, own), (begin + own * page, -(-tail // page))])
    total = 1 + sum(count for each in ranges for _, count in each)
    arenas = [
        random((total, layers, heads, page, dim), dtype, device) for _ in range(2)
    ]
    context = max(begin + count * page for each in ranges for begin, count in each)
    table = torch.zeros(len(segments), context, dtype=torch.int32, device=device)
    blocks = torch.randperm(total - 1, device=device) + 1
    offsets, taken = torch.arange(page, device=device), 0
    for row, each in enumerate(ranges):
        for begin, count in each:
            slots = blocks[taken : taken + count, None] * page + offsets
            table[row, begin : begin + count * page] = slots.flatten()
            taken += count
    spans = Spans.uncompressed(len(segments), per_block, "cpu")
    begins = torch.tensor([[begin for begin, _ in each] for each in ranges])
    own = torch.stack([shares(s * per_block, per_block, sigma) for s in segments])
    spans.begin.copy_(begins)
    spans.first[:, 0], spans.first[:, 1] = torch.arange(per_block), own.cumsum(1) - own
    spans.count[:, 0], spans.count[:, 1] = torch.tensor(shared)[:, None], own
    spans.stride.copy_(torch.tensor([per_block, 1]))
    tail = torch.tensor(tails)
    held = spans.count.sum(1) * page + tail[:, None]
    cache = KVCache(*arenas, table, Spans(*(x.to(device) for x in vars(spans).values())))
    request = torch.arange(len(segments), device=device)
    batch = Batch(cache, request, (begins[:, 2] + tail).to(device))
    return Ragged(batch, held.view(-1, layers, heads).to(device))


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Numbers of any float type; of 8 bits those whose bytes are below those of infinities."""
    if dtype.itemsize > 1:
        return torch.empty(shape, dtype=dtype, device=device).normal_()
    return torch.empty(shape, dtype=torch.uint8, device=device).random_(0, 0x70).view(dtype)


def shares(total: int, parts: int, sigma: float) -> torch.Tensor:
    """`total` pages among `parts` heads, lognormal: int64 [parts], on the CPU."""
    if not total or not sigma:
        return torch.full((parts,), total // parts)
    weights = torch.randn(parts).mul(sigma).exp()
    pages = 1 + ((total - parts) * weights / weights.sum()).long()
    pages[pages.argmax()] += total - pages.sum()
    return pages
