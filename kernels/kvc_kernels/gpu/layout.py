"""Where a head's KVs lie, for kernels: the addressing rule of `kvc_kernels.pages` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvc_kernels.batch import Batch

#: The interpreter computes `tl.dot` of bfloat16 wrongly, without a word; kernels upcast there.
INTERPRETED = bool(triton.knobs.runtime.interpret)


def tables(batch: Batch) -> tuple[torch.Tensor, ...]:
    """What kernels take: req_to_token, begin, first, count, stride, request, seq_len."""
    spans = batch.cache.spans
    return (
        batch.cache.req_to_token, spans.begin, spans.first, spans.count, spans.stride,
        batch.request, batch.seq_len,
    )  # fmt: skip


@triton.jit
def head_spans(
    begin, first, count, stride, row, layer_head, PER_BLOCK: tl.constexpr, P: tl.constexpr
):
    """Where one head of one request (`row`, int64) has its KVs, for `head_place`: int32 each.

    Returns
    -------
    shared, packed : pages before the own span, and before the tail.
    places : of the shared span, the own one and the tail, where the head's page 0 would lie were
        its pages counted over all spans; counted from the row's first block.
    strides : of the shared span and the own one, as in `kvc_kernels.cache.Spans`.
    tail : the position where the tail begins.
    """
    of_span, of_head = row * 2, row * 2 * PER_BLOCK + layer_head
    shared = tl.load(count + of_head)
    packed = shared + tl.load(count + of_head + PER_BLOCK)
    strides = tl.load(stride + of_span), tl.load(stride + of_span + 1)
    tail = tl.load(begin + row * 3 + 2)
    shared_begin = tl.load(begin + row * 3) // P * PER_BLOCK
    own_begin = tl.load(begin + row * 3 + 1) // P * PER_BLOCK
    places = (
        tl.load(first + of_head) + shared_begin,
        tl.load(first + of_head + PER_BLOCK) + own_begin - shared * strides[1],
        layer_head + (tail // P - packed) * PER_BLOCK,
    )
    return shared, packed, places, strides, tail


@triton.jit
def held_kvs(spans, length, P: tl.constexpr):
    """KVs of a head, int32: `spans` from `head_spans`, of a request of so many tokens."""
    _, packed, _, _, tail = spans
    return packed * P + tl.maximum(length.to(tl.int32) - tail, 0)


@triton.jit
def quotient(number, divisor: tl.constexpr):
    """``number // divisor`` of int32 that are not negative: signed division takes more steps."""
    return (number.to(tl.uint32) // divisor).to(tl.int32)


@triton.jit
def head_place(nth, spans, PER_BLOCK: tl.constexpr):
    """The place of a head's nth page, counted from its row's first block; int32.

    Pages count over what the head holds: its shared span, its own span, then the tail. The page
    is in the row's block ``place // PER_BLOCK``.
    """
    shared, packed, places, strides, _ = spans
    in_own, in_tail = nth >= shared, nth >= packed
    place = tl.where(in_tail, places[2], tl.where(in_own, places[1], places[0]))
    return place + nth * tl.where(in_tail, PER_BLOCK, tl.where(in_own, strides[1], strides[0]))


@triton.jit
def head_page(row, nth, valid, spans, PER_BLOCK: tl.constexpr, P: tl.constexpr):
    """The flat page ([num_blocks * L * H, P, D]) that is a head's nth; int64.

    Parameters
    ----------
    row : pointer to the request's row of `req_to_token`.
    nth, valid : which pages, int32; where not valid nothing is read and the result is of no use.
    spans : what `head_spans` returned.
    """
    place = head_place(nth, spans, PER_BLOCK)
    in_row = quotient(place, PER_BLOCK)
    slot = tl.load(row + in_row * P, mask=valid, other=0)
    # block * PER_BLOCK + place % PER_BLOCK
    return (quotient(slot, P) - in_row).to(tl.int64) * PER_BLOCK + place


@triton.jit
def head_kv(row, token, valid, spans, PER_BLOCK: tl.constexpr, P: tl.constexpr):
    """Where a head's tokens are in the flat view [num_blocks * L * H * P, D]; cf. `head_page`."""
    nth = quotient(token, P)
    return head_page(row, nth, valid, spans, PER_BLOCK, P) * P + (token - nth * P)
