"""Attention of one query per request over its segment and tail (split-KV, device lengths).

Every (request, KV head) is a row of work with a length of its own, cut into splits that run side
by side and are merged by their log-sum-exp (Flash-Decoding; arXiv 2410.00161, section 4).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvc_kernels.gpu.layout import INTERPRETED, Cache, head_extent, head_page

#: Keys of a tile at a time, by the head dim it is padded to.
_TILE = {16: 128, 32: 128, 64: 128, 128: 64, 256: 32}
#: Programs that fill a GPU, and what a split is not cut below.
_PROGRAMS_PER_PROCESSOR, _MOST_SPLITS = 4, 64


@triton.jit
def _load_rows(base, row, column, valid, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    pointers = base + row[:, None] * WIDTH + column[None, :]
    if WIDTH == WIDTH_PAD:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    return tl.load(pointers, mask=valid[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _decode(
    query, arena_k, arena_v,
    req_to_token, segment_begin, tail_begin, page_start, request, seq_len,
    out, lse,
    scale, layer, context, query_stride,
    HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One split of one head: `out` [splits, B, H*G, Dv] and natural `lse` [splits, B, H*G]."""
    owner, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch, head = owner // HEADS, owner % HEADS
    row = tl.load(request + batch).to(tl.int64)
    layer_head = layer * HEADS + head
    begin, end, first, pages = head_extent(
        segment_begin, tail_begin, page_start, row, layer_head, PER_BLOCK
    )
    held = (pages * P + tl.load(seq_len + batch) - end).to(tl.int32)
    share = tl.cdiv(tl.cdiv(held, TILE), splits) * TILE
    low = split * share
    high = tl.minimum(low + share, held)

    member, column, value_column = (
        tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    )  # fmt: skip
    mine = member < GROUP
    q = _load_rows(
        query + batch.to(tl.int64) * query_stride + head * GROUP * D, member, column, mine, D, D_PAD
    )
    q = q.to(tl.float32) if UPCAST else q
    largest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, DV_PAD], tl.float32)
    log2_scale = scale * 1.4426950408889634
    for at in range(low, high, TILE):
        token = at + tl.arange(0, TILE)
        valid = token < high
        page = head_page(
            req_to_token + row * context, token, valid, begin, end, first, pages, layer_head,
            PER_BLOCK, P,
        )  # fmt: skip
        place = page * P + token % P
        keys = _load_rows(arena_k, place, column, valid, D, D_PAD).to(q.dtype)
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * log2_scale
        logits = tl.where(valid[None, :], logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp2(largest - new_largest)
        weights = tl.exp2(logits - new_largest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        values = _load_rows(arena_v, place, value_column, valid, DV, DV_PAD).to(q.dtype)
        result = result * shrink[:, None] + tl.dot(
            weights.to(q.dtype), values, input_precision="ieee"
        )
        largest = new_largest
    some = high > low
    result = tl.where(some, result / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    natural = tl.where(some, (largest + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    line = (split * (tl.num_programs(0) // HEADS) + batch).to(tl.int64) * HEADS * GROUP
    line += head * GROUP + member
    tl.store(lse + line, natural, mask=mine)
    tl.store(
        out + line[:, None] * DV + value_column[None, :],
        result.to(out.dtype.element_ty),
        mask=mine[:, None] & (value_column < DV)[None, :],
    )


@triton.jit
def _merge(
    part, part_lse, out, lse, lines,
    SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """One query head of one request: all of its splits."""
    line, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS_PAD)
    column = tl.arange(0, DV_PAD)
    each = tl.load(part_lse + split * lines + line, mask=split < SPLITS, other=float("-inf"))
    largest = tl.max(each, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp(each - largest)
    total = tl.sum(weights, 0)
    loaded = tl.load(
        part + (split[:, None] * lines + line) * DV + column[None, :],
        mask=(weights > 0)[:, None] & (column < DV)[None, :],
        other=0.0,
    )
    result = tl.sum(loaded * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + line * DV + column, result.to(out.dtype.element_ty), mask=column < DV)
    tl.store(lse + line, largest + tl.log(total))


@triton.jit
def _accumulate(
    query, arena_k, lse, metric, counted,
    req_to_token, segment_begin, tail_begin, page_start, request, seq_len,
    scale, layer, context, query_stride,
    HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Squared attention of one split of one head, added to the metric of its KVs."""
    owner, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch, head = owner // HEADS, owner % HEADS
    row = tl.load(request + batch).to(tl.int64)
    if tl.load(counted + row) != 0:
        layer_head = layer * HEADS + head
        begin, end, first, pages = head_extent(
            segment_begin, tail_begin, page_start, row, layer_head, PER_BLOCK
        )
        held = (pages * P + tl.load(seq_len + batch) - end).to(tl.int32)
        share = tl.cdiv(tl.cdiv(held, TILE), splits) * TILE
        low = split * share
        high = tl.minimum(low + share, held)
        member, column = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
        mine = member < GROUP
        q = _load_rows(
            query + batch.to(tl.int64) * query_stride + head * GROUP * D,
            member, column, mine, D, D_PAD,
        )  # fmt: skip
        q = q.to(tl.float32) if UPCAST else q
        line = batch.to(tl.int64) * HEADS * GROUP + head * GROUP + member
        natural = tl.load(lse + line, mask=mine, other=0.0)
        for at in range(low, high, TILE):
            token = at + tl.arange(0, TILE)
            valid = token < high
            page = head_page(
                req_to_token + row * context, token, valid, begin, end, first, pages, layer_head,
                PER_BLOCK, P,
            )  # fmt: skip
            place = page * P + token % P
            keys = _load_rows(arena_k, place, column, valid, D, D_PAD).to(q.dtype)
            logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
            attention = tl.where(mine[:, None], tl.exp(logits - natural[:, None]), 0.0)
            # No other program holds these pages: a counted request shares none.
            before = tl.load(metric + place, mask=valid, other=0.0)
            tl.store(metric + place, before + tl.sum(attention * attention, 0), mask=valid)


def splits_for(requests: int, cache: Cache) -> int:
    """Splits that fill the GPU whatever the lengths are, so that a CUDA graph can hold them."""
    rows = max(1, requests * cache.heads)
    if not cache.arena_k.is_cuda:
        return 1
    processors = torch.cuda.get_device_properties(cache.arena_k.device).multi_processor_count
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, rows)
    return max(1, min(_MOST_SPLITS, wanted))


def decode(
    query: torch.Tensor,
    cache: Cache,
    layer: int,
    request: torch.Tensor,
    seq_len: torch.Tensor,
    scale: float,
    *,
    metric: torch.Tensor | None = None,
    counted: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one layer for a decode step.

    Parameters
    ----------
    query : [B, H*G, D], dense but for its first stride.
    layer : of the arena.
    request : integer [B], rows of the request tables.
    seq_len : integer [B], KVs a request has had so far, kept or not, this token's included.
    scale : factor on the logits.
    metric : float32 [num_blocks, L, H, P]; squared attention, summed over the query group, is
        added to the KVs of requests that are `counted` (arXiv 2410.00161, eq. 20).
    counted : bool [rows], by request row.
    splits : programs a head's KVs are shared among; None is `splits_for`.

    Returns
    -------
    out : [B, H*G, Dv] in the query's dtype; zero for a request without KVs.
    lse : float32 [B, H*G], natural; -inf without KVs.
    """
    requests, query_heads, dim = query.shape
    heads, value_dim = cache.heads, cache.arena_v.shape[-1]
    group, rest = divmod(query_heads, heads)
    if rest or dim != cache.arena_k.shape[-1] or not query[:1].is_contiguous():
        raise ValueError(f"query {tuple(query.shape)} does not fit {heads} KV heads of {dim}")
    splits = splits or splits_for(requests, cache)
    out = query.new_empty(requests, query_heads, value_dim)
    lse = torch.empty(requests, query_heads, dtype=torch.float32, device=query.device)
    part, part_lse = out, lse
    if splits > 1:
        part = lse.new_empty(splits, *out.shape)
        part_lse = lse.new_empty(splits, *lse.shape)
    if not requests:
        return out, lse
    pad = triton.next_power_of_2(dim)
    tables = (
        cache.req_to_token, cache.segment_begin, cache.tail_begin, cache.page_start,
        request, seq_len,
    )  # fmt: skip
    numbers = (scale, layer, cache.req_to_token.shape[1], query.stride(0))
    shape = {
        "HEADS": heads, "PER_BLOCK": cache.layers * heads, "P": cache.page_size,
        "GROUP": group, "GROUP_PAD": max(16, triton.next_power_of_2(group)),
        "D": dim, "D_PAD": max(16, pad), "TILE": _TILE[max(16, pad)], "UPCAST": INTERPRETED,
    }  # fmt: skip
    values = {"DV": value_dim, "DV_PAD": max(16, triton.next_power_of_2(value_dim))}
    grid = (requests * heads, splits)
    _decode[grid](
        query, cache.arena_k, cache.arena_v, *tables, part, part_lse, *numbers, **shape, **values,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        lines = requests * query_heads
        _merge[(lines,)](
            part, part_lse, out, lse, lines,
            SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), **values, num_warps=4,
        )  # fmt: skip
    if metric is not None:
        _accumulate[grid](
            query, cache.arena_k, lse, metric, counted, *tables, *numbers, **shape, num_warps=4,
        )  # fmt: skip
    return out, lse
