"""Causal attention of new tokens over what their requests hold, compressed or not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvc_kernels.batch import Batch
from kvc_kernels.gpu.attend import attend, nothing
from kvc_kernels.gpu.layout import INTERPRETED, head_kv, head_spans, held_kvs, tables


@triton.jit(do_not_specialize=["layer"])
def _extend(
    query, arena_k, arena_v,
    req_to_token, begin, first, count, stride, request, seq_len, start, chosen,
    out, lse,
    scale, layer, context, query_stride,
    HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr, PREFIX: tl.constexpr,
):  # fmt: skip
    """ROWS of one KV head's queries, its group's heads side by side: row = token * G + member.

    With PREFIX only of the `chosen` requests, and only what they held before the new tokens:
    it joins what `out` and `lse` have of the latter.
    """
    owner = tl.program_id(1)
    batch, head = owner // HEADS, owner % HEADS
    if PREFIX:
        batch = tl.load(chosen + batch)
    from_token = tl.load(start + batch)
    new = (tl.load(start + batch + 1) - from_token).to(tl.int32)
    at_row = tl.program_id(0) * ROWS
    if at_row < new * GROUP:
        row = tl.load(request + batch).to(tl.int64)
        spans = head_spans(begin, first, count, stride, row, layer * HEADS + head, PER_BLOCK, P)
        held = held_kvs(spans, tl.load(seq_len + batch), P)
        line = at_row + tl.arange(0, ROWS)
        mine = line < new * GROUP
        token_of_line = line // GROUP
        to_line = (from_token + token_of_line).to(tl.int64) * HEADS * GROUP
        to_line += head * GROUP + line % GROUP
        column, value_column = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
        place_of_line = (from_token + token_of_line).to(tl.int64) * query_stride
        place_of_line += (head * GROUP + line % GROUP) * D
        q = tl.load(
            query + place_of_line[:, None] + column[None, :],
            mask=mine[:, None] & (column < D)[None, :],
            other=0.0,
        )
        q = q.to(tl.float32) if UPCAST else q
        to_value = to_line[:, None] * DV + value_column[None, :]
        written = mine[:, None] & (value_column < DV)[None, :]
        log2_scale = scale * 1.4426950408889634
        if PREFIX:
            last_visible = held - new - 1 + tl.zeros_like(line)
            high = held - new
            largest = tl.load(lse + to_line, mask=mine, other=0.0) * 1.4426950408889634
            total = tl.full([ROWS], 1.0, tl.float32)
            state = largest, total, tl.load(out + to_value, mask=written, other=0.0).to(tl.float32)
        else:
            last_visible = held - new + token_of_line
            high = tl.minimum(held, held - new + (at_row + ROWS - 1) // GROUP + 1)
            state = nothing(ROWS, DV_PAD)
        for at in range(0, high, TILE):
            token = at + tl.arange(0, TILE)
            valid = token < high
            place = head_kv(req_to_token + row * context, token, valid, spans, PER_BLOCK, P)
            # Key 0 is visible to all.
            visible = token[None, :] <= last_visible[:, None]
            state = attend(
                q, arena_k, arena_v, place, valid, visible, log2_scale, state,
                D, D_PAD, DV, DV_PAD,
            )  # fmt: skip
        largest, total, result = state
        tl.store(lse + to_line, (largest + tl.log2(total)) * 0.6931471805599453, mask=mine)
        values = (result / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + to_value, values, mask=written)


def extend(
    query: torch.Tensor, batch: Batch, layer: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvc_kernels.extend.extend`, which has checked its arguments; waits for nothing."""
    tokens, query_heads, _ = query.shape
    out = query.new_empty(tokens, query_heads, batch.cache.arena_v.shape[-1])
    lse = torch.empty(tokens, query_heads, dtype=torch.float32, device=query.device)
    _launch(query, batch, layer, scale, out, lse)
    return out, lse


def add_prefix(
    query: torch.Tensor,
    batch: Batch,
    layer: int,
    scale: float,
    chosen: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Have new tokens attend to what their requests held before them, compressed or not.

    Parameters
    ----------
    query, batch, layer, scale : as for `kvc_kernels.extend.extend`.
    chosen : int64 [C], which requests of the batch; on the device.
    out, lse : contiguous [t, H*G, Dv] and float32 [t, H*G], natural: attention of the new tokens
        among themselves. Those of the chosen requests are changed in place.
    """
    assert out.is_contiguous()
    assert lse.is_contiguous()
    _launch(query, batch, layer, scale, out, lse, chosen)


def _launch(
    query: torch.Tensor,
    batch: Batch,
    layer: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    chosen: torch.Tensor | None = None,
) -> None:
    assert batch.new is not None
    cache, (tokens, query_heads, dim) = batch.cache, query.shape
    heads, value_dim = cache.heads, cache.arena_v.shape[-1]
    if not tokens:
        return
    group, pad = query_heads // heads, max(16, triton.next_power_of_2(dim))
    rows, requests = 64 if pad <= 128 else 32, len(batch.request if chosen is None else chosen)
    grid = (triton.cdiv(max(batch.new) * group, rows), requests * heads)
    _extend[grid](
        query, cache.arena_k, cache.arena_v, *tables(batch), batch.start,
        batch.start if chosen is None else chosen, out, lse,
        scale, layer, cache.req_to_token.shape[1], query.stride(0),
        HEADS=heads, PER_BLOCK=cache.layers * heads, P=cache.page_size, GROUP=group,
        D=dim, D_PAD=pad, DV=value_dim, DV_PAD=max(16, triton.next_power_of_2(value_dim)),
        ROWS=rows, TILE=64 if pad <= 128 else 32, UPCAST=INTERPRETED, PREFIX=chosen is not None,
        num_warps=4, num_stages=3 if pad <= 128 else 2,
    )  # fmt: skip
