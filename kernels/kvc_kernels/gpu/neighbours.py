"""Scores pooled over neighbours, or faded to them, in one launch: cf. `kvc_kernels.score`."""

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl

from kvc_kernels.gpu.windows import COLUMNS, WindowScores

#: Half-lives from the largest float32 down below the least that counts (`score._LEAST`, 2 ** -120).
_REACH = 256
_LEAST = tl.constexpr(1e-36)
_TILE = 512


@triton.jit
def _pooled(scores, position, n, before, pool, HOW: tl.constexpr):
    """Scores at `position`, those before `before` pooled; HOW is 0 for none, 1 largest, 2 mean."""
    own = tl.load(scores + position, mask=(position >= 0) & (position < n), other=0.0)
    if HOW == 0:
        return own
    inside = (position >= 0) & (position < before)
    nothing = float("-inf") if HOW == 1 else 0.0
    result = tl.zeros_like(own) + nothing
    for shift in range(pool):
        at = position + shift - pool // 2
        there = inside & (at >= 0) & (at < before)
        value = tl.load(scores + at, mask=there, other=nothing)
        result = tl.maximum(result, value) if HOW == 1 else result + value
    if HOW == 2:
        result = tl.div_rn(result, pool.to(tl.float32))
    return tl.where(inside, result, own)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _log(scores, position, n, before, pool, HOW: tl.constexpr):
    """float64; -inf where no key is."""
    value = _pooled(scores, position, n, before, pool, HOW).to(tl.float64)
    least = tl.full([], _LEAST, tl.float64)
    return tl.where(position < n, tl.log(tl.maximum(value, least)), float("-inf"))


@triton.jit(do_not_specialize=["n", "own", "row", "pool", "slope", "reach"])
def _smooth(
    out, scores, prompts, half_lives, n, own, row, pool, slope, reach,
    HOW: tl.constexpr, FADES: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of one head. `slope`: the bits of a float64, logarithms lost a position.

    `half_lives`: float64, each head's own instead; `reach` is enough for all.
    """
    head = tl.program_id(0).to(tl.int64)
    from_row = head * row
    if prompts is not None:
        prompts += tl.program_id(2) * COLUMNS
        n, own = tl.load(prompts).to(tl.int32), tl.load(prompts + 1).to(tl.int32)
        from_row = tl.load(prompts + 2) + head * n
        out += tl.load(prompts + 2)
    begin = tl.program_id(1) * TILE
    if begin >= n:
        return
    scores += from_row
    each = tl.arange(0, TILE)
    position, before = begin + each, n - own
    if FADES:
        fall = slope.to(tl.float64, bitcast=True)
        if half_lives is not None:
            fall = fall / tl.load(half_lives + head)
        logs = _log(scores, position, n, before, pool, HOW)
        down = position.to(tl.float64) * fall
        left = tl.full([], float("-inf"), tl.float64)
        for start in range(tl.maximum(begin - reach, 0), begin, TILE):
            at = start + each
            other = _log(scores, at, n, before, pool, HOW) + at.to(tl.float64) * fall
            left = tl.maximum(left, tl.max(tl.where(at < begin, other, float("-inf")), 0))
        right = tl.full([], float("-inf"), tl.float64)
        for start in range(begin + TILE, tl.minimum(begin + TILE + reach, n), TILE):
            at = start + each
            other = _log(scores, at, n, before, pool, HOW) - at.to(tl.float64) * fall
            right = tl.maximum(right, tl.max(other, 0))
        from_left = tl.maximum(left, tl.associative_scan(logs + down, 0, _larger)) - down
        scanned = tl.associative_scan(logs - down, 0, _larger, reverse=True)
        from_right = tl.maximum(right, scanned) + down
        result = tl.exp(tl.maximum(from_left, from_right)).to(tl.float32)
    else:
        result = _pooled(scores, position, n, before, pool, HOW)
    tl.store(out + head * n + position, result, mask=position < n)


def smooth(
    scores: torch.Tensor,
    own: int,
    pool: int,
    pooling: str,
    half_life: float,
    half_lives: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kvc_kernels.score.smooth` of scores [R, n]: a new tensor."""
    rows, n = scores.shape
    if scores.stride(-1) != 1:
        scores = scores.contiguous()
    out = torch.empty(rows, n, dtype=torch.float32, device=scores.device)
    _launch(out, scores, None, n, own, rows, 1, pool, pooling, half_life, half_lives)
    return out


def smooth_all(
    found: WindowScores,
    pool: int,
    pooling: str,
    half_life: float,
    half_lives: torch.Tensor | None = None,
) -> WindowScores:
    """`smooth` of every prompt of a batch, each with its own window."""
    out = WindowScores(
        torch.empty_like(found.flat), found.table, found.lengths, found.own, found.heads
    )
    _launch(
        out.flat, found.flat.view(found.heads, -1) if found.table is None else found.flat,
        found.table, max(found.lengths), found.own[0], found.heads, len(found.lengths),
        pool, pooling, half_life, half_lives,
    )  # fmt: skip
    return out


def _launch(
    out: torch.Tensor,
    scores: torch.Tensor,
    table: torch.Tensor | None,
    n: int,
    own: int,
    rows: int,
    prompts: int,
    pool: int,
    pooling: str,
    half_life: float,
    half_lives: torch.Tensor | None,
) -> None:
    if not n or not rows:
        return
    slope = math.log(2) / half_life if half_life and half_lives is None else math.log(2)
    bits = struct.unpack("<q", struct.pack("<d", slope))[0]
    reach = min(n, math.ceil(_REACH * half_life))
    _smooth[(rows, triton.cdiv(n, _TILE), prompts)](
        out, scores, table, half_lives, n, own, scores.stride(0), pool, bits, reach,
        HOW=0 if pool == 1 else 1 if pooling == "max" else 2,
        FADES=half_life > 0, COLUMNS=COLUMNS, TILE=_TILE, num_warps=4,
    )  # fmt: skip
