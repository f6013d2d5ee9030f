"""Ragged batches of segment and tail at real sizes, built on the device."""

from __future__ import annotations

import dataclasses

import torch
from kvc_kernels.gpu.layout import Cache
from kvc_kernels.pages import Rows


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A batch: what the kernels read, the same for the references, and KVs of every head.

    Attributes
    ----------
    held : int64 [B, L, H], KVs of every head.
    """

    cache: Cache
    rows: Rows
    held: torch.Tensor

    @property
    def request(self) -> torch.Tensor:
        return self.rows.request

    @property
    def seq_len(self) -> torch.Tensor:
        return self.rows.seq_len


def build(
    segments: list[int],
    tails: list[int],
    *,
    layers: int,
    heads: int,
    page: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    skewed: bool = True,
) -> Ragged:
    """Requests of ``segments[b]`` blocks (0: not compressed) and ``tails[b]`` tokens.

    `skewed` shares a segment's pages unequally among the heads, one at least for each.
    """
    torch.manual_seed(0)
    per_block = layers * heads
    counts = [s + -(-t // page) for s, t in zip(segments, tails, strict=True)]
    total = 1 + sum(counts)
    arenas = [
        torch.empty(total, layers, heads, page, dim, dtype=dtype, device=device).normal_()
        for _ in range(2)
    ]
    begins = [page if s else 0 for s in segments]  # compressed rows release their first block
    ends = [begin + s * page for begin, s in zip(begins, segments, strict=True)]
    context = max(begin + n * page for begin, n in zip(begins, counts, strict=True))
    table = torch.zeros(len(segments), context, dtype=torch.int32, device=device)
    blocks = torch.randperm(total - 1, device=device) + 1
    offsets, taken = torch.arange(page, device=device), 0
    for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
        slots = blocks[taken : taken + count, None] * page + offsets
        table[row, begin : begin + count * page] = slots.flatten()
        taken += count
    pages = torch.stack([shares(s * per_block, per_block, skewed) for s in segments])
    page_start = torch.zeros(len(segments), per_block + 1, dtype=torch.int64)
    page_start[:, 1:] = pages.cumsum(1)
    begin, end, tail = (torch.tensor(each, device=device) for each in (begins, ends, tails))
    page_start = page_start.to(device)
    rows = Rows(
        table, torch.arange(len(segments), device=device), end + tail, begin, end, page_start
    )
    held = pages.view(-1, layers, heads).to(device) * page + tail[:, None, None]
    return Ragged(Cache(*arenas, table, begin, end, page_start), rows, held)


def shares(total: int, parts: int, skewed: bool) -> torch.Tensor:
    """`total` pages among `parts` heads: int64 [parts], on the CPU."""
    if not total or not skewed:
        return torch.full((parts,), total // parts)
    weights = torch.randn(parts).exp()
    pages = 1 + ((total - parts) * weights / weights.sum()).long()
    pages[pages.argmax()] += total - pages.sum()
    return pages
