"""Attention of one query per request over all that it holds (split-KV, device lengths).

Every (request, KV head) is a row of work with a length of its own, cut into splits that run side
by side and are merged by their log-sum-exp (Flash-Decoding; arXiv 2410.00161, section 4).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache
from kvc_kernels.gpu.attend import attend, load_rows, nothing
from kvc_kernels.gpu.layout import INTERPRETED, head_kv, head_spans, held_kvs, tables

#: Keys of a tile at a time, by the head dim it is padded to.
_TILE = {16: 128, 32: 128, 64: 128, 128: 64, 256: 32}
#: Programs that fill a GPU, and what a split is not cut below.
_PROGRAMS_PER_PROCESSOR, _MAX_SPLITS = 4, 64
#: Of a program over an 8-bit cache: by itself it takes 189 (sm_90), and two fit a processor, not 3.
REGISTERS_OF_8_BITS = 168


@triton.jit
def _decode(
    query, arena_k, arena_v,
    req_to_token, begin, first, count, stride, request, seq_len,
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
    spans = head_spans(begin, first, count, stride, row, layer * HEADS + head, PER_BLOCK)
    held = held_kvs(spans, tl.load(seq_len + batch), P)
    share = tl.cdiv(tl.cdiv(held, TILE), splits) * TILE
    low = split * share
    high = tl.minimum(low + share, held)

    member, column, value_column = (
        tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    )  # fmt: skip
    mine = member < GROUP
    q = load_rows(
        query + batch.to(tl.int64) * query_stride + head * GROUP * D, member, column, mine, D, D_PAD
    )
    q = q.to(tl.float32) if UPCAST else q
    state = nothing(GROUP_PAD, DV_PAD)
    log2_scale = scale * 1.4426950408889634
    for at in range(low, high, TILE):
        token = at + tl.arange(0, TILE)
        valid = token < high
        place = head_kv(req_to_token + row * context, token, valid, spans, PER_BLOCK, P)
        state = attend(
            q, arena_k, arena_v, place, valid, valid[None, :], log2_scale, state,
            D, D_PAD, DV, DV_PAD,
        )  # fmt: skip
    largest, total, result = state
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
    query, arena_k, lse, metric, tracked,
    req_to_token, begin, first, count, stride, request, seq_len,
    scale, layer, context, query_stride,
    HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A power of one split's attention, added to the metric of the head's own span and tail."""
    owner, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch, head = owner // HEADS, owner % HEADS
    row = tl.load(request + batch).to(tl.int64)
    power = tl.load(tracked + row)
    if power != 0:
        spans = head_spans(begin, first, count, stride, row, layer * HEADS + head, PER_BLOCK)
        held, shared = held_kvs(spans, tl.load(seq_len + batch), P), spans[0] * P
        share = tl.cdiv(tl.cdiv(held - shared, TILE), splits) * TILE
        low = shared + split * share
        high = tl.minimum(low + share, held)
        member, column = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
        mine = member < GROUP
        q = load_rows(
            query + batch.to(tl.int64) * query_stride + head * GROUP * D,
            member, column, mine, D, D_PAD,
        )  # fmt: skip
        q = q.to(tl.float32) if UPCAST else q
        line = batch.to(tl.int64) * HEADS * GROUP + head * GROUP + member
        natural = tl.load(lse + line, mask=mine, other=0.0)
        for at in range(low, high, TILE):
            token = at + tl.arange(0, TILE)
            valid = token < high
            place = head_kv(req_to_token + row * context, token, valid, spans, PER_BLOCK, P)
            keys = load_rows(arena_k, place, column, valid, D, D_PAD).to(q.dtype)
            logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
            attention = tl.where(mine[:, None], tl.exp(logits - natural[:, None]), 0.0)
            # No other program has these pages: nobody else holds a tracked request's own ones.
            before = tl.load(metric + place, mask=valid, other=0.0)
            paid = tl.where(power == 2, attention * attention, attention)
            tl.store(metric + place, before + tl.sum(paid, 0), mask=valid)


def splits_for(requests: int, cache: KVCache) -> int:
    """Splits that fill the GPU whatever the lengths are, so that a CUDA graph can hold them."""
    rows = max(1, requests * cache.heads)
    if not cache.arena_k.is_cuda:
        return 1
    processors = torch.cuda.get_device_properties(cache.arena_k.device).multi_processor_count
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, rows)
    return max(1, min(_MAX_SPLITS, wanted))


def decode(
    query: torch.Tensor,
    batch: Batch,
    layer: int,
    scale: float,
    *,
    metric: torch.Tensor | None = None,
    tracked: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvc_kernels.decode.decode`, which has checked its arguments.

    Waits for nothing and reads only device memory, so it can be captured in a CUDA graph.

    Parameters
    ----------
    splits : programs a head's KVs are shared among; None is `splits_for`.
    """
    cache, (requests, query_heads, dim) = batch.cache, query.shape
    heads, value_dim = cache.heads, cache.arena_v.shape[-1]
    group = query_heads // heads
    splits = splits or splits_for(requests, cache)
    out = query.new_empty(requests, query_heads, value_dim)
    lse = torch.empty(requests, query_heads, dtype=torch.float32, device=query.device)
    part, part_lse = out, lse
    if splits > 1:
        part = lse.new_empty(splits, *out.shape)
        part_lse = lse.new_empty(splits, *lse.shape)
    if not requests:
        return out, lse
    pad = max(16, triton.next_power_of_2(dim))
    numbers = (scale, layer, cache.req_to_token.shape[1], query.stride(0))
    shape = {
        "HEADS": heads, "PER_BLOCK": cache.layers * heads, "P": cache.page_size,
        "GROUP": group, "GROUP_PAD": max(16, triton.next_power_of_2(group)),
        "D": dim, "D_PAD": pad, "TILE": _TILE[pad], "UPCAST": INTERPRETED,
    }  # fmt: skip
    values = {"DV": value_dim, "DV_PAD": max(16, triton.next_power_of_2(value_dim))}
    grid = (requests * heads, splits)
    _decode[grid](
        query, cache.arena_k, cache.arena_v, *tables(batch), part, part_lse, *numbers,
        **shape, **values, num_warps=4, num_stages=3,
        maxnreg=REGISTERS_OF_8_BITS if cache.arena_k.itemsize == 1 else None,
    )  # fmt: skip
    if splits > 1:
        lines = requests * query_heads
        _merge[(lines,)](
            part, part_lse, out, lse, lines,
            SPLITS=splits, SPLITS_PAD=triton.next_power_of_2(splits), **values, num_warps=4,
        )  # fmt: skip
    if metric is not None:
        _accumulate[grid](
            query, cache.arena_k, lse, metric, tracked, *tables(batch), *numbers,
            **shape, num_warps=4,
        )  # fmt: skip
    return out, lse
