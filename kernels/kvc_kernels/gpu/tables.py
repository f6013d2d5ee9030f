"""Block tables for attention kernels that know nothing of heads.

A kernel that serves one length per batch row serves a length per head when every row is one head
of one request: its "sequences" are the ``B * H`` owners and its cache is the arena's flat view
[num_blocks * L * H, P, D] with a single KV head.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from kvc_kernels.batch import Batch
from kvc_kernels.gpu.layout import head_page, head_spans, held_kvs, tables

#: Table entries of a program.
_BLOCK = 256


@triton.jit(do_not_specialize=["context"])
def _prefix_blocks(
    req_to_token, request, indptr, blocks, context, P: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a request and BLOCK pages of it; programs behind its last one do nothing."""
    nth_request, low = tl.program_id(0), tl.program_id(1) * BLOCK
    begin, end = tl.load(indptr + nth_request), tl.load(indptr + nth_request + 1)
    if low < end - begin:
        nth = low + tl.arange(0, BLOCK)
        valid = nth < end - begin
        row = tl.load(request + nth_request).to(tl.int64)
        slot = tl.load(req_to_token + row * context + nth * P, mask=valid, other=0)
        tl.store(blocks + begin + nth, slot // P, mask=valid)


def prefix_blocks(batch: Batch, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first blocks of uncompressed requests, without waiting for the device.

    Parameters
    ----------
    counts : how many of every request.

    Returns
    -------
    indptr : int32 [B + 1] on the host; request b has blocks ``indptr[b]`` to ``indptr[b + 1]``.
    blocks : int32 [N] on the device.
    """
    table = batch.cache.req_to_token
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    blocks = torch.empty(sum(counts), dtype=torch.int32, device=table.device)
    if len(blocks):
        grid = (len(counts), triton.cdiv(max(counts), _BLOCK))
        _prefix_blocks[grid](
            table, batch.request, indptr.to(table.device, non_blocking=True), blocks,
            table.shape[1], P=batch.cache.page_size, BLOCK=_BLOCK,
        )  # fmt: skip
    return indptr, blocks


@triton.jit(do_not_specialize=["layer", "max_pages", "least"])
def _block_table(
    req_to_token, begin, first, count, stride, request, seq_len, table, length,
    layer, context, max_pages, least,
    H: tl.constexpr, PER_BLOCK: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
    BY_HEAD: tl.constexpr,
):  # fmt: skip
    """One program a row and BLOCK entries of it; programs behind the row's end do nothing."""
    owner, low = tl.program_id(0), tl.program_id(1) * BLOCK
    batch, head = owner // H, owner % H
    if BY_HEAD:
        requests = tl.num_programs(0) // H
        batch, head = owner % requests, owner // requests
    row = tl.load(request + batch).to(tl.int64)
    spans = head_spans(begin, first, count, stride, row, layer * H + head, PER_BLOCK, P)
    held = held_kvs(spans, tl.load(seq_len + batch), P)
    tl.device_assert(held <= max_pages * P, "max_pages is not an upper bound")  # TRITON_DEBUG=1
    # A row whose request has just gone may be half cleared: whatever it says, nobody reads
    # outside of the table.
    held = tl.minimum(tl.maximum(held, least), max_pages * P)
    pages = tl.cdiv(held, P)
    if low == 0:
        tl.store(length + owner, held)
    if low < pages:
        nth = low + tl.arange(0, BLOCK)
        valid = nth < pages
        page = head_page(req_to_token + row * context, nth, valid, spans, PER_BLOCK, P)
        tl.store(table + owner.to(tl.int64) * max_pages + nth, page.to(tl.int32), mask=valid)


def block_table(
    batch: Batch,
    layer: int,
    max_pages: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    least: int = 0,
    by_head: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where every head of every request keeps its KVs in one layer.

    Waits for nothing and reads only device memory, so it can be captured in a CUDA graph.

    Parameters
    ----------
    max_pages : at least as many as any head holds. ``ceil(seq_len / P)`` of the longest request
        always is, compressed or not: pages of spans are full and hold kept positions only.
    out : `table` and `length` to write to; entries of `table` behind a row's pages are left as
        they are, so it must have held page ids (or zeros) all along.
    least : the length of rows without KVs, for kernels that cannot do with none; 0 or 1.
    by_head : whether the rows of a head come together, row ``h * B + b``.

    Returns
    -------
    table : int32 [B * H, max_pages], page ids in the arena's flat view [num_blocks * L * H, P, D];
        row ``b * H + h`` is head ``h`` of request ``b``, if not `by_head`. New tables are
        zero behind the pages.
    length : int32 [B * H], KVs of every row, never less than `least`.
    """
    cache = batch.cache
    per_block, owners = cache.layers * cache.heads, len(batch.request) * cache.heads
    if not 0 <= layer < cache.layers:
        raise ValueError(f"layer {layer} of {cache.layers}")
    if cache.arena_k.shape[0] * per_block > torch.iinfo(torch.int32).max:
        raise ValueError("the arena has more head pages than an int32 can name")
    if out is None:
        table = torch.zeros(owners, max_pages, dtype=torch.int32, device=batch.request.device)
        length = torch.empty(owners, dtype=torch.int32, device=batch.request.device)
    else:
        table, length = out
    for name, tensor, shape in ("table", table, (owners, max_pages)), ("length", length, (owners,)):
        if tensor.shape != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be a contiguous int32 tensor of shape {shape}")
    if owners:
        grid = (owners, triton.cdiv(max_pages, _BLOCK))
        _block_table[grid](
            *tables(batch), table, length,
            layer, cache.req_to_token.shape[1], max_pages, least,
            H=cache.heads, PER_BLOCK=per_block, P=cache.page_size, BLOCK=_BLOCK,
            BY_HEAD=by_head,
        )  # fmt: skip
    return table, length
