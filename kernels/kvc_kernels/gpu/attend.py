"""One tile of attention, for kernels that go over a head's KVs tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(base, row, column, valid, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """Rows of WIDTH from `base`, zero where not `valid`; [rows, WIDTH_PAD]."""
    pointers = base + row[:, None] * WIDTH + column[None, :]
    if WIDTH == WIDTH_PAD:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    return tl.load(pointers, mask=valid[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def attend(
    q, arena_k, arena_v, place, valid, visible, log2_scale, state,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """Take one tile of KVs into the softmax (Flash Attention; base 2).

    Parameters
    ----------
    q : [lines, D_PAD].
    place, valid : int64 and bool [tile], rows of the arenas' flat views [KVs, D].
    visible : bool, broadcasts to [lines, tile]; in every line something of the first tile is.
    state : of every line the largest logit so far, the sum of exponentials, and the weighted sum
        of values; begins as `nothing`.
    """
    largest, total, result = state
    keys = load_rows(arena_k, place, tl.arange(0, D_PAD), valid, D, D_PAD).to(q.dtype)
    logits = tl.dot(q, tl.trans(keys), input_precision="ieee") * log2_scale
    logits = tl.where(visible, logits, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(logits, 1))
    shrink = tl.exp2(largest - new_largest)
    weights = tl.exp2(logits - new_largest[:, None])
    total = total * shrink + tl.sum(weights, 1)
    values = load_rows(arena_v, place, tl.arange(0, DV_PAD), valid, DV, DV_PAD).to(q.dtype)
    result = result * shrink[:, None] + tl.dot(weights.to(q.dtype), values, input_precision="ieee")
    return new_largest, total, result


@triton.jit
def nothing(LINES: tl.constexpr, DV_PAD: tl.constexpr):
    """The state of `attend` before the first tile."""
    largest = tl.full([LINES], float("-inf"), tl.float32)
    return largest, tl.zeros([LINES], tl.float32), tl.zeros([LINES, DV_PAD], tl.float32)
