"""Causal attention of new tokens over what their requests hold, compressed or not."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvc_kernels.gpu.decode import _load_rows
from kvc_kernels.gpu.layout import INTERPRETED, Cache, head_extent, head_page


@triton.jit
def _extend(
    query, arena_k, arena_v,
    req_to_token, segment_begin, tail_begin, page_start, request, seq_len, start,
    out, lse,
    scale, layer, context, query_stride,
    HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """ROWS of one KV head's queries, its group's heads side by side: row = token * G + member."""
    owner = tl.program_id(1)
    batch, head = owner // HEADS, owner % HEADS
    from_token = tl.load(start + batch)
    new = (tl.load(start + batch + 1) - from_token).to(tl.int32)
    at_row = tl.program_id(0) * ROWS
    if at_row < new * GROUP:
        row = tl.load(request + batch).to(tl.int64)
        layer_head = layer * HEADS + head
        begin, end, first, pages = head_extent(
            segment_begin, tail_begin, page_start, row, layer_head, PER_BLOCK
        )
        held = (pages * P + tl.load(seq_len + batch) - end).to(tl.int32)
        line = at_row + tl.arange(0, ROWS)
        mine = line < new * GROUP
        token_of_line = line // GROUP
        last_visible = held - new + token_of_line
        column, value_column = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
        place_of_line = (from_token + token_of_line).to(tl.int64) * query_stride
        place_of_line += (head * GROUP + line % GROUP) * D
        q = tl.load(
            query + place_of_line[:, None] + column[None, :],
            mask=mine[:, None] & (column < D)[None, :],
            other=0.0,
        )
        q = q.to(tl.float32) if UPCAST else q
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DV_PAD], tl.float32)
        log2_scale = scale * 1.4426950408889634
        high = tl.minimum(held, held - new + (at_row + ROWS - 1) // GROUP + 1)
        for at in range(0, high, TILE):
            token = at + tl.arange(0, TILE)
            valid = token < high
            page = head_page(
                req_to_token + row * context, token, valid, begin, end, first, pages, layer_head,
                PER_BLOCK, P,
            )  # fmt: skip
            place = page * P + token % P
            keys = _load_rows(arena_k, place, column, valid, D, D_PAD).to(q.dtype)
            logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * log2_scale
            # Key 0 is visible to all, so no line's maximum is ever -inf.
            logits = tl.where(token[None, :] <= last_visible[:, None], logits, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(logits, 1))
            shrink = tl.exp2(largest - new_largest)
            weights = tl.exp2(logits - new_largest[:, None])
            total = total * shrink + tl.sum(weights, 1)
            values = _load_rows(arena_v, place, value_column, valid, DV, DV_PAD).to(q.dtype)
            result = result * shrink[:, None] + tl.dot(
                weights.to(q.dtype), values, input_precision="ieee"
            )
            largest = new_largest
        to_line = (from_token + token_of_line).to(tl.int64) * HEADS * GROUP
        to_line += head * GROUP + line % GROUP
        tl.store(lse + to_line, (largest + tl.log2(total)) * 0.6931471805599453, mask=mine)
        tl.store(
            out + to_line[:, None] * DV + value_column[None, :],
            (result / total[:, None]).to(out.dtype.element_ty),
            mask=mine[:, None] & (value_column < DV)[None, :],
        )


def extend(
    query: torch.Tensor,
    cache: Cache,
    layer: int,
    request: torch.Tensor,
    seq_len: torch.Tensor,
    start: torch.Tensor,
    most_new: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one layer for a prefill (chunk); the new tokens' KVs are in the cache already.

    Parameters
    ----------
    query : [t, H*G, D], the new tokens of all requests, dense but for its first stride.
    layer : of the arena.
    request : integer [B], rows of the request tables.
    seq_len : integer [B], KVs a request has had so far, kept or not, the new ones included.
    start : integer [B + 1], where each request's new tokens begin in `query`; its last is t.
    most_new : the most new tokens a request has, known to the host.
    scale : factor on the logits.

    Returns
    -------
    out : [t, H*G, Dv] in the query's dtype.
    lse : float32 [t, H*G], natural.
    """
    tokens, query_heads, dim = query.shape
    heads, value_dim = cache.heads, cache.arena_v.shape[-1]
    group, rest = divmod(query_heads, heads)
    if rest or dim != cache.arena_k.shape[-1] or not query[:1].is_contiguous():
        raise ValueError(f"query {tuple(query.shape)} does not fit {heads} KV heads of {dim}")
    out = query.new_empty(tokens, query_heads, value_dim)
    lse = torch.empty(tokens, query_heads, dtype=torch.float32, device=query.device)
    if not tokens:
        return out, lse
    pad = max(16, triton.next_power_of_2(dim))
    rows = 64 if pad <= 128 else 32
    grid = (triton.cdiv(most_new * group, rows), len(request) * heads)
    _extend[grid](
        query, cache.arena_k, cache.arena_v, cache.req_to_token, cache.segment_begin,
        cache.tail_begin, cache.page_start, request, seq_len, start, out, lse,
        scale, layer, cache.req_to_token.shape[1], query.stride(0),
        HEADS=heads, PER_BLOCK=cache.layers * heads, P=cache.page_size, GROUP=group,
        D=dim, D_PAD=pad, DV=value_dim, DV_PAD=max(16, triton.next_power_of_2(value_dim)),
        ROWS=rows, TILE=64 if pad <= 128 else 32, UPCAST=INTERPRETED,
        num_warps=4, num_stages=3 if pad <= 128 else 2,
    )  # fmt: skip
    return out, lse
