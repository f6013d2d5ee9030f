"""Attention of queries that are asked again, part by part (`kvc_kernels.repeat`).

Two launches for all parts of a chunk: what every query's attention sums to, then the most that any
query of the part pays each key. Logits never leave a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvc_kernels.gpu.layout import INTERPRETED
from kvc_kernels.gpu.score import blocks, load_rows

_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["rows", "n", "part_rows", "part_keys"])
def _sums(
    sums, queries, keys, lse, log2_scale, rows, n, part_rows, part_keys,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp `sums` [rows, H*G] over a part's keys and what `lse` knows besides."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    tiles = tl.cdiv(part_rows * GROUP, ROWS)
    part = tl.program_id(0) // tiles
    line = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    mine = line < tl.minimum(part_rows, rows - part * part_rows) * GROUP
    token = (part * part_rows + line // GROUP).to(tl.int64)
    place = token * (heads * GROUP) + head * GROUP + line % GROUP
    q = load_rows(queries, place * D, mine, D, D_PAD, UPCAST)
    # Finite, so that a part without keys yields no NaN.
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    high = tl.minimum((part + 1) * part_keys, n)
    for at in range(part * part_keys, high, TILE):
        position = at + tl.arange(0, TILE)
        there = position < high
        row = (position.to(tl.int64) * heads + head) * D
        k = load_rows(keys, row, there, D, D_PAD, UPCAST)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
        logits = tl.where(there[None, :], logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        total = total * tl.exp2(largest - new_largest)
        total += tl.sum(tl.exp2(logits - new_largest[:, None]), 1)
        largest = new_largest
    own = largest + tl.log2(total)
    known = tl.load(lse + place, mask=mine, other=0.0) * 1.4426950408889634
    both = tl.maximum(own, known)
    both += tl.log2(tl.exp2(own - both) + tl.exp2(known - both))
    tl.store(sums + place, both, mask=mine)


@triton.jit(do_not_specialize=["rows", "n", "part_rows", "part_keys"])
def _best(
    scores, queries, keys, sums, log2_scale, rows, n, part_rows, part_keys,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`scores` [H, n] of a tile of one head's keys: the most that a query of their part pays."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    tiles = tl.cdiv(part_keys, TILE)
    part = tl.program_id(0) // tiles
    position = part * part_keys + tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    there = position < tl.minimum((part + 1) * part_keys, n)
    k = load_rows(keys, (position.to(tl.int64) * heads + head) * D, there, D, D_PAD, UPCAST)
    best = tl.full([TILE], float("-inf"), tl.float32)
    lines = tl.minimum(part_rows, rows - part * part_rows) * GROUP
    for begin in range(0, lines, ROWS):
        line = begin + tl.arange(0, ROWS)
        mine = line < lines
        token = (part * part_rows + line // GROUP).to(tl.int64)
        place = token * (heads * GROUP) + head * GROUP + line % GROUP
        q = load_rows(queries, place * D, mine, D, D_PAD, UPCAST)
        total = tl.load(sums + place, mask=mine, other=0.0)
        logits = tl.dot(k, tl.trans(q), input_precision="ieee") * log2_scale - total[None, :]
        best = tl.maximum(best, tl.max(tl.where(mine[None, :], logits, float("-inf")), 1))
    tl.store(scores + head.to(tl.int64) * n + position, tl.exp2(best), mask=there)


def repeat_parts(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    lse: torch.Tensor,
    part_rows: int,
    part_keys: int,
) -> torch.Tensor:
    """`kvc_kernels.repeat.repeat_attention` of parts: every `part_rows` queries and their keys.

    16-bit keys are multiplied with queries of their type.

    Parameters
    ----------
    queries, lse : [r, H*G, D] and float32 [r, H*G].
    keys : [n, H, D]; as many parts as of the queries.

    Returns
    -------
    scores : float32 [H, n].
    """
    (rows, query_heads, _), (n, heads, _) = queries.shape, keys.shape
    scores = torch.empty(heads, n, dtype=torch.float32, device=keys.device)
    if not rows or not n:
        return scores.zero_()
    queries, keys, lse = queries.to(keys.dtype).contiguous(), keys.contiguous(), lse.contiguous()
    sums = torch.empty(rows, query_heads, dtype=torch.float32, device=keys.device)
    shape = {"GROUP": query_heads // heads, **blocks(queries), "UPCAST": INTERPRETED}
    sizes = scale * _LOG2_E, rows, n, part_rows, part_keys
    tiles = triton.cdiv(part_rows * shape["GROUP"], shape["ROWS"])
    _sums[(triton.cdiv(rows, part_rows) * tiles, heads)](
        sums, queries, keys, lse, *sizes, **shape, num_warps=4
    )
    tiles = triton.cdiv(part_keys, shape["TILE"])
    _best[(triton.cdiv(n, part_keys) * tiles, heads)](
        scores, queries, keys, sums, *sizes, **shape, num_warps=4
    )
    return scores
