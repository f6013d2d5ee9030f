"""What the KVs of tracked requests were worth to a decode step: a second pass over the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvc_kernels.batch import Batch
from kvc_kernels.gpu.attend import load_rows
from kvc_kernels.gpu.layout import INTERPRETED
from kvc_kernels.gpu.schedule import Schedule, read_row, tile_kvs, width
from kvc_kernels.gpu.second_pass import SecondPass, first_own_tile, second_pass_of


@triton.jit(do_not_specialize=["layer", "requests", "width"])
def _accumulate(
    query, arena_k, lse, metric, members, heads, blocks, cuts,
    scale, layer, requests, width, query_stride,
    HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TILE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A power of attention, added to the metric of one stretch's own spans and tails."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    cut = cuts + (layer * (programs + 1) + program) * 2
    from_line, from_tile = tl.load(cut), tl.load(cut + 1)
    to_line, to_tile = tl.load(cut + 2), tl.load(cut + 3)
    member, column = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    mine = member < GROUP
    for nth_line in range(0, tl.where(to_tile > 0, to_line + 1, to_line) - from_line):
        line = from_line + nth_line
        batch, head = tl.load(members + line // HEADS * 2), line % HEADS
        power = tl.load(members + line // HEADS * 2 + 1)
        row = batch * HEADS + head
        held, spans = read_row(heads, layer * requests * HEADS + row)
        shared, first = spans[0] * P, first_own_tile(spans[0], P, TILE)
        low = first + tl.where(line == from_line, from_tile, 0)
        high = tl.where(line == to_line, first + to_tile, tl.cdiv(held, TILE))
        asked = query + batch.to(tl.int64) * query_stride + head * GROUP * D
        q = load_rows(asked, member, column, mine, D, D_PAD)
        q = q.to(tl.float32) if INTERPRETED else q
        natural = tl.load(lse + row.to(tl.int64) * GROUP + member, mask=mine, other=0.0)
        for nth in range(low, high):
            place, token = tile_kvs(
                blocks + batch.to(tl.int64) * width, spans, held, nth, PER_BLOCK, P, TILE
            )
            valid = (token >= shared) & (token < held)
            keys = load_rows(arena_k, place, column, valid, D, D_PAD).to(q.dtype)
            logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
            attention = tl.where(mine[:, None], tl.exp(logits - natural[:, None]), 0.0)
            # No other program has these KVs: nobody else holds a tracked request's own ones.
            before = tl.load(metric + place, mask=valid, other=0.0)
            paid = tl.where(power == 2, attention * attention, attention)
            tl.store(metric + place, before + tl.sum(paid, 0), mask=valid)


def accumulate(
    query: torch.Tensor,
    batch: Batch,
    layer: int,
    scale: float,
    lse: torch.Tensor,
    metric: torch.Tensor,
    tracked: torch.Tensor,
    schedule: Schedule,
) -> None:
    """Add a power of attention to `metric`, as `kvc_kernels.decode.decode` says.

    Goes by the batch's `SecondPass`; the first layer makes one where there is none.

    Parameters
    ----------
    lse : float32 [B, H*G], natural, of this query over all that is held.
    schedule : of this batch.
    """
    cache, (requests, query_heads, dim) = batch.cache, query.shape
    group, second = query_heads // cache.heads, second_pass_of(batch)
    if second is None:
        second = SecondPass.allocate(cache, requests, schedule.programs)
        second.update(batch, schedule, tracked)
    _accumulate[(second.programs,)](
        query, cache.arena_k, lse, metric, second.members,
        schedule.heads, schedule.blocks, second.cuts,
        scale, layer, requests, width(cache), query.stride(0),
        HEADS=cache.heads, PER_BLOCK=cache.layers * cache.heads, P=cache.page_size,
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        D=dim, D_PAD=max(16, triton.next_power_of_2(dim)),
        TILE=schedule.tile, INTERPRETED=INTERPRETED, num_warps=4,
    )  # fmt: skip
