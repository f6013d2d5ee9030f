"""Where a head's KVs lie, for kernels: the addressing rule of segment and tail (`pages.py`)."""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

#: The interpreter computes `tl.dot` of bfloat16 wrongly, without a word; kernels upcast there.
INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclasses.dataclass(frozen=True)
class Cache:
    """Everything that says where KVs are; the engine's own tensors, read by request row.

    Attributes
    ----------
    arena_k, arena_v : [num_blocks, L, H, P, D] and [num_blocks, L, H, P, Dv], contiguous.
    req_to_token : int32 [rows, max_context], the slot of every position of every request.
    segment_begin, tail_begin : int64 [rows], the F and S of the addressing rule.
    page_start : int64 [rows, L*H + 1], first page of each head within the segment.
    """

    arena_k: torch.Tensor
    arena_v: torch.Tensor
    req_to_token: torch.Tensor
    segment_begin: torch.Tensor
    tail_begin: torch.Tensor
    page_start: torch.Tensor

    def __post_init__(self):
        for name in ("arena_k", "arena_v", "req_to_token", "page_start"):
            tensor = getattr(self, name)
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
        if self.arena_k.shape[:-1] != self.arena_v.shape[:-1]:
            raise ValueError("arena_k and arena_v differ in blocks, layers, heads or page size")

    @property
    def layers(self) -> int:
        return self.arena_k.shape[1]

    @property
    def heads(self) -> int:
        return self.arena_k.shape[2]

    @property
    def page_size(self) -> int:
        return self.arena_k.shape[3]


@triton.jit
def head_extent(
    segment_begin, tail_begin, page_start, request, layer_head, PER_BLOCK: tl.constexpr
):
    """Of one head of one request: F, S, its first page in the segment, and its pages there."""
    starts = page_start + request * (PER_BLOCK + 1) + layer_head
    first = tl.load(starts)
    pages = tl.load(starts + 1) - first
    return tl.load(segment_begin + request), tl.load(tail_begin + request), first, pages


@triton.jit
def head_page(
    row, token, valid, begin, end, first, pages, layer_head,
    PER_BLOCK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The flat page ([num_blocks * L * H, P, D]) of a head's tokens; offset is ``token % P``.

    Tokens count what the head holds: its segment, all pages full, then the tail.

    Parameters
    ----------
    row : pointer to the request's row of `req_to_token`.
    token, valid : which tokens; where not valid nothing is read and the page is of block 0.
    begin, end, first, pages : what `head_extent` returned.
    """
    nth = token // P
    in_tail = nth >= pages
    run = first + nth
    position = tl.where(in_tail, end + (nth - pages) * P, begin + run // PER_BLOCK * P)
    index = tl.where(in_tail, layer_head, run % PER_BLOCK)
    block = tl.load(row + position, mask=valid, other=0) // P
    return block.to(tl.int64) * PER_BLOCK + index
