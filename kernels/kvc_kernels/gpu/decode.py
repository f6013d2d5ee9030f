"""Attention of one query per request over all that it holds: a line of work, cut equally.

Programs that fill the GPU once take equal stretches of the line that `schedule.py` lays out, so
one long head sets nothing; what several stretches share of a head is merged by its log-sum-exp
(Flash-Decoding; arXiv 2410.00161, section 4). A program is one warp if it can: there is nothing
that warps would wait for in each other, and programs of a processor hide what each waits for.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache
from kvc_kernels.gpu.eight_bits import as_pairs, halves, kind_of, split_columns
from kvc_kernels.gpu.layout import INTERPRETED
from kvc_kernels.gpu.metric import accumulate
from kvc_kernels.gpu.occupancy import Processor
from kvc_kernels.gpu.schedule import (
    LEAST,
    ROW_COST,
    Schedule,
    read_row,
    schedule_of,
    stretches_of,
    tile_kvs,
    width,
)  # fmt: skip

#: Bytes of keys and values that a tile has, and the fewest and most KVs of one; of 8 bits the most
#: is half of that, for registers.
_TILE_BYTES, _FEWEST, _MOST = 16 << 10, 16, 64
#: Page ids are loaded, then KVs, then used, three tiles apart: two tiles are always on their way.
STAGES = 7
#: Programs in the interpreter, which runs one after the other.
_INTERPRETED = 4


@triton.jit
def load_tile(
    arena, place, column, valid, WIDTH: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr
):
    """Rows of WIDTH; [tile, PAD]. Where not `valid`, zero if MASKED and whatever is there else."""
    pointers = arena + place[:, None] * WIDTH + column[None, :]
    if MASKED:
        if WIDTH == PAD:
            return tl.load(pointers, mask=valid[:, None], other=0)
        return tl.load(pointers, mask=valid[:, None] & (column < WIDTH)[None, :], other=0)
    if WIDTH == PAD:
        return tl.load(pointers)
    return tl.load(pointers, mask=(column < WIDTH)[None, :], other=0)


@triton.jit(do_not_specialize=["layer", "rows", "width"])
def _decode(
    query, arena_k, arena_v, heads, blocks, cuts,
    out, lse, part, part_lse,
    scale, layer, rows, width, query_stride,
    HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, P: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    TILE: tl.constexpr, KIND: tl.constexpr, INTERPRETED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stretch: `out` [B, H*G, Dv] and natural `lse` of whole heads, parts of others.

    `part` [programs * 2, G, Dv] and `part_lse` [programs * 2, G] have two places a program: for the
    head that another program begins, and for the one that it begins itself.
    """
    PAIR: tl.constexpr = 1 if KIND == "" else 2
    W: tl.constexpr = D // PAIR
    W_PAD: tl.constexpr = D_PAD // PAIR
    WV: tl.constexpr = DV // PAIR
    WV_PAD: tl.constexpr = DV_PAD // PAIR
    program, programs = tl.program_id(0), tl.num_programs(0)
    cut = cuts + (layer * (programs + 1) + program) * 2
    from_row, from_tile = tl.load(cut), tl.load(cut + 1)
    to_row, to_tile = tl.load(cut + 2), tl.load(cut + 3)
    member, dim, value_dim = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    mine = (member < GROUP)[:, None]
    to_log2 = scale * 1.4426950408889634
    for nth_row in range(0, tl.where(to_tile > 0, to_row + 1, to_row) - from_row):
        row = from_row + nth_row
        held, spans = read_row(heads, layer * rows + row)
        batch, head = row // HEADS, row % HEADS
        tiles = tl.cdiv(held, TILE)
        low = tl.where(row == from_row, from_tile, 0)
        high = tl.where(row == to_row, to_tile, tiles)
        asked = query + batch.to(tl.int64) * query_stride + head * GROUP * D
        q = tl.load(
            asked + member[:, None] * D + dim[None, :], mask=mine & (dim < D)[None, :], other=0.0
        )
        q, q_odd = split_columns(q, KIND)
        if INTERPRETED:
            q, q_odd = q.to(tl.float32), q_odd.to(tl.float32)
        largest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PAD, TILE], tl.float32)
        result = tl.zeros([GROUP_PAD, WV_PAD], tl.float32)
        result_odd = result
        for nth in tl.range(low, high, num_stages=STAGES):
            place, token = tile_kvs(
                blocks + batch.to(tl.int64) * width, spans, held, nth, PER_BLOCK, P, TILE
            )
            valid = token < held
            keys = load_tile(arena_k, place, tl.arange(0, W_PAD), valid, W, W_PAD, False)
            values = load_tile(arena_v, place, tl.arange(0, WV_PAD), valid, WV, WV_PAD, True)
            if KIND == "":
                keys, values = keys.to(q.dtype), values.to(q.dtype)
                logits = tl.dot(q, tl.trans(keys), input_precision="ieee")
            else:
                keys, keys_odd = halves(keys, KIND, INTERPRETED)
                values, values_odd = halves(values, KIND, INTERPRETED)
                logits = tl.dot(q, tl.trans(keys.to(q.dtype)))
                logits = tl.dot(q_odd, tl.trans(keys_odd.to(q.dtype)), logits)
            logits = tl.where(valid[None, :], logits, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(logits, 1) * to_log2)
            shrink = tl.exp2(largest - new_largest)
            weights = tl.exp2(logits * to_log2 - new_largest[:, None])
            largest, total = new_largest, total * shrink[:, None] + weights
            weights = weights.to(q.dtype)
            result = tl.dot(
                weights, values.to(q.dtype), result * shrink[:, None], input_precision="ieee"
            )
            if KIND != "":
                result_odd = tl.dot(weights, values_odd.to(q.dtype), result_odd * shrink[:, None])
        if KIND != "":
            result = tl.interleave(result, result_odd)
        sums = tl.sum(total, 1)
        result *= (1.0 / tl.where(sums > 0, sums, 1.0))[:, None]
        natural = (largest + tl.log2(sums)) * 0.6931471805599453
        mask = mine & (value_dim < DV)[None, :]
        if (low == 0) & (high == tiles):
            line = row.to(tl.int64) * GROUP + member
            tl.store(lse + line, natural, mask=member < GROUP)
            to_out = out + line[:, None] * DV + value_dim[None, :]
            tl.store(to_out, result.to(out.dtype.element_ty), mask=mask)
        elif high > low:
            line = (program * 2 + tl.where(low == 0, 1, 0)) * GROUP + member
            tl.store(part_lse + line, natural, mask=member < GROUP)
            tl.store(part + line[:, None] * DV + value_dim[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["layer", "rows", "programs"])
def _merge(
    part, part_lse, starts, cuts, out, lse, layer, rows, programs,
    GROUP: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    COST: tl.constexpr, LEAST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One query head of the head that a program ends and others began, if there is one."""
    program, member = tl.program_id(0), tl.program_id(1)
    cut = cuts + (layer * (programs + 1) + program) * 2
    row = tl.load(cut)
    if (tl.load(cut + 1) > 0) & (tl.load(cut + 2) > row):
        line = starts + layer * (rows + 1)
        end = tl.load(line + rows)
        stretches = stretches_of(end, programs, LEAST).to(tl.int64)
        # The stretch with the row's first tile: the last whose cut is not behind it.
        first = ((tl.load(line + row) + COST + 1) * stretches - 1) // end
        first = first.to(tl.int32)
        column = tl.arange(0, DV_PAD)
        largest, total = float("-inf"), 0.0
        result = tl.zeros([DV_PAD], tl.float32)
        for low in range(first, program + 1, AT_ONCE):
            nth = low + tl.arange(0, AT_ONCE)
            at = (nth * 2 + tl.where(nth == first, 1, 0)) * GROUP + member
            each = tl.load(part_lse + at, mask=nth <= program, other=float("-inf"))
            new_largest = tl.maximum(largest, tl.max(each, 0))
            shrink, weights = tl.exp(largest - new_largest), tl.exp(each - new_largest)
            loaded = tl.load(
                part + at[:, None] * DV + column[None, :],
                mask=(nth <= program)[:, None] & (column < DV)[None, :], other=0.0,
            )  # fmt: skip
            result = result * shrink + tl.sum(loaded * weights[:, None], 0)
            largest, total = new_largest, total * shrink + tl.sum(weights, 0)
        to = row.to(tl.int64) * GROUP + member
        tl.store(lse + to, largest + tl.log(total))
        tl.store(
            out + to * DV + column, (result / total).to(out.dtype.element_ty), mask=column < DV
        )


def tile_of(cache: KVCache) -> int:
    """KVs of a tile."""
    row = pad_of(cache.arena_k.shape[-1]) + pad_of(cache.arena_v.shape[-1])
    most = _MOST // 2 if kind_of(cache.arena_k.dtype) else _MOST
    return max(_FEWEST, min(most, _TILE_BYTES // (row * cache.arena_k.itemsize)))


def pad_of(dim: int) -> int:
    """The width that rows of `dim` are padded to; of 8 bits half of it is what matrices take."""
    return max(32, triton.next_power_of_2(dim))


def _warps(cache: KVCache) -> int:
    """Warps of a program: one, but where its registers do not hold what it sums up."""
    if cache.arena_k.itemsize == 4:  # no matrix units
        return 4
    return 2 if max(cache.arena_k.shape[-1], cache.arena_v.shape[-1]) > 128 else 1


def constants_of(cache: KVCache, query_heads: int, tile: int) -> dict:
    """What the decode kernel is compiled for, and how."""
    dim, value_dim = cache.arena_k.shape[-1], cache.arena_v.shape[-1]
    group, warps = query_heads // cache.heads, _warps(cache)
    return {
        "HEADS": cache.heads, "PER_BLOCK": cache.layers * cache.heads, "P": cache.page_size,
        "GROUP": group, "GROUP_PAD": max(16, triton.next_power_of_2(group)),
        "D": dim, "D_PAD": pad_of(dim), "DV": value_dim, "DV_PAD": pad_of(value_dim),
        "TILE": tile, "KIND": kind_of(cache.arena_k.dtype),
        "INTERPRETED": INTERPRETED, "STAGES": STAGES, "num_warps": warps,
        "maxnreg": None if warps == 4 else 255,  # the assembler would rather have more programs
    }  # fmt: skip


@functools.lru_cache
def _resident(device: torch.device, types: tuple, constants: tuple) -> int:
    """Programs of `_decode` that the GPU holds at once, by what they are compiled to."""
    dtype, cache_dtype = types
    tensors = (dtype, cache_dtype, cache_dtype, *[torch.int32] * 3, dtype, *[torch.float32] * 3)
    kernel = _decode.warmup(*tensors, 1.0, 0, 0, 0, 16, grid=(1,), **dict(constants))
    kernel._init_handles()
    held = Processor.of(device).resident(
        registers=kernel.n_regs, shared=kernel.metadata.shared, warps=kernel.metadata.num_warps
    )
    return held * torch.cuda.get_device_properties(device).multi_processor_count


def new_schedule(
    cache: KVCache,
    requests: int,
    query_heads: int,
    dtype: torch.dtype,
    *,
    programs: int | None = None,
    tile: int | None = None,
) -> Schedule:
    """Room for the schedule of steps of `requests` requests or fewer.

    Parameters
    ----------
    query_heads, dtype : of the queries.
    programs : that share a layer's work; None is as many as the GPU holds at once.
    tile : KVs of a tile; None is what suits the cache.
    """
    tile = tile or tile_of(cache)
    if programs is None and not cache.arena_k.is_cuda:
        programs = _INTERPRETED
    if programs is None:
        constants = tuple(constants_of(cache, query_heads, tile).items())
        types = dtype, as_pairs(cache.arena_k[:0]).dtype
        programs = _resident(cache.arena_k.device, types, constants)
    return Schedule.allocate(cache, requests, programs, tile)


def decode(
    query: torch.Tensor,
    batch: Batch,
    layer: int,
    scale: float,
    *,
    metric: torch.Tensor | None = None,
    tracked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kvc_kernels.decode.decode`, which has checked its arguments.

    Goes by the batch's schedule; the first layer makes one where there is none. Waits for nothing
    and reads only device memory, so it can be captured in a CUDA graph.
    """
    cache, (requests, query_heads, _) = batch.cache, query.shape
    value_dim = cache.arena_v.shape[-1]
    out = query.new_empty(requests, query_heads, value_dim)
    lse = torch.empty(requests, query_heads, dtype=torch.float32, device=query.device)
    if not requests:
        return out, lse
    schedule = schedule_of(batch)
    if schedule is None:
        schedule = new_schedule(cache, requests, query_heads, query.dtype)
        schedule.update(batch)
    constants, programs = constants_of(cache, query_heads, schedule.tile), schedule.programs
    group, rows = constants["GROUP"], requests * cache.heads
    part = lse.new_empty(programs * 2, group, value_dim)
    part_lse = lse.new_empty(programs * 2, group)
    _decode[(programs,)](
        query, as_pairs(cache.arena_k), as_pairs(cache.arena_v),
        schedule.heads, schedule.blocks, schedule.cuts, out, lse, part, part_lse,
        scale, layer, rows, width(cache), query.stride(0), **constants,
    )  # fmt: skip
    _merge[(programs, group)](
        part, part_lse, schedule.starts, schedule.cuts, out, lse, layer, rows, programs,
        GROUP=group, DV=value_dim, DV_PAD=triton.next_power_of_2(value_dim),
        COST=ROW_COST, LEAST=LEAST, AT_ONCE=16, num_warps=1,
    )  # fmt: skip
    if metric is not None:
        assert tracked is not None
        accumulate(query, batch, layer, scale, lse, metric, tracked, schedule)
    return out, lse
