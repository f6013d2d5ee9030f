"""Where a head's KVs lie: the addressing rule of spans (`kvc_kernels.cache.Spans`) in torch."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvc_kernels.cache import Batch, KVCache


@dataclasses.dataclass(frozen=True, eq=False)
class HeadPages:
    """The head pages that one layer of a batch reads, ragged over (request, head).

    Attributes
    ----------
    page : int64 [N], page id in the arena's flat view [num_blocks * L * H, P, D].
    owner : int64 [N], ``request_in_batch * H + head``, ascending.
    length : int32 [N], KVs in the page, 1 to P.
    count : int32 [B * H], pages of every owner.
    run : int64 [N]; its remainder by 3 is the span that the page is in, 2 for the tail.
    """

    page: torch.Tensor
    owner: torch.Tensor
    length: torch.Tensor
    count: torch.Tensor
    run: torch.Tensor

    @functools.cached_property
    def shared(self) -> torch.Tensor:
        """bool [N], whether the page is in its request's shared span."""
        return self.run % 3 == 0


@dataclasses.dataclass(frozen=True, eq=False)
class RowPages:
    """The head pages of one request.

    Attributes
    ----------
    page : int64 [L, H, C], page ids of every head, in order; C is the most that any head has.
        Behind a head's last page there is any page.
    held : KVs of every head, ``held[layer][head]``.
    """

    page: torch.Tensor
    held: list[list[int]]


def span_pages(
    cache: KVCache,
    begin: torch.Tensor,
    first: torch.Tensor,
    stride: torch.Tensor,
    nth: torch.Tensor,
) -> torch.Tensor:
    """THE addressing rule: the nth page of a head in one span of a request, or in its tail.

    Parameters
    ----------
    begin : int64, where the span begins in the flat view of `req_to_token`.
    first, stride : of the head in the span, as in `Spans`; of the tail ``layer * H + head`` and
        ``L * H``.
    nth : from 0. All integers that broadcast.

    Returns
    -------
    page : int64, page ids in the arena's flat view [num_blocks * L * H, P, D].
    """
    per_block, page_size = cache.layers * cache.heads, cache.page_size
    place = first + nth * stride
    in_run = place // per_block
    slot = cache.req_to_token.take(begin + in_run * page_size)
    return (slot // page_size).long() * per_block + (place - in_run * per_block)


def page_ids(
    cache: KVCache,
    row: torch.Tensor | int,
    layer_head: torch.Tensor | int,
    nth: torch.Tensor,
) -> torch.Tensor:
    """The nth page of a head, counted over its shared span, its own span and its tail.

    Waits for nothing on a device.

    Parameters
    ----------
    row : request row. layer_head : ``layer * H + head``. nth : pages that the head holds; for a
        negative one the result is some page that there is. All integers that broadcast.

    Returns
    -------
    page : int64, page ids in the arena's flat view [num_blocks * L * H, P, D].
    """
    spans = cache.spans
    shared, own = (spans.count[row, span, layer_head] for span in (0, 1))
    in_own, in_tail = nth >= shared, nth >= shared + own
    nth = nth - torch.where(in_own, shared, 0) - torch.where(in_tail, own, 0)
    table, span = in_own.long(), in_own.long() + in_tail
    first = torch.where(in_tail, layer_head, spans.first[row, table, layer_head])
    stride = torch.where(in_tail, cache.layers * cache.heads, spans.stride[row, table])
    begin = row * cache.req_to_token.shape[1] + spans.begin[row, span]
    return span_pages(cache, begin, first, stride, nth.clamp(min=0))


def head_pages(batch: Batch) -> list[HeadPages]:
    """The head pages of every request and head, in order, one entry a layer.

    All layers at once: this is many small steps, and a decode step should take them once. A run
    is what a head of a request has in one span or in the tail; there are [L, B, H, 3].
    """
    cache, spans = batch.cache, batch.cache.spans
    layers, heads, page_size = cache.layers, cache.heads, cache.page_size
    request = batch.request.long()
    begin = spans.begin[request]
    in_tail = batch.seq_len.int() - begin[:, 2]
    tail_pages = (in_tail + (page_size - 1)) // page_size

    count, first, stride = begin.new_empty(3, layers, len(request), heads, 3)
    for runs, table in ((count, spans.count), (first, spans.first)):
        by_head = table[request].unflatten(2, (layers, heads))
        runs[..., :2] = by_head.permute(2, 0, 3, 1)
    count[..., 2] = tail_pages[:, None]
    first[..., 2] = torch.arange(layers * heads, device=first.device).view(layers, 1, heads)
    stride[..., :2] = spans.stride[request][:, None]
    stride[..., 2] = layers * heads
    start = (begin + request[:, None] * cache.req_to_token.shape[1])[:, None].expand(count.shape)
    end = count.flatten().cumsum(0).view(count.shape)
    # So that pages may be counted from 0 over all runs.
    first -= (end - count) * stride

    each = torch.arange(count.numel(), device=count.device)
    run = torch.repeat_interleave(each, count.flatten())
    page = span_pages(
        cache,
        start.flatten().index_select(0, run),
        first.flatten().index_select(0, run),
        stride.flatten().index_select(0, run),
        torch.arange(len(run), dtype=torch.int32, device=run.device),
    )
    owner = (each // 3 % (len(request) * heads)).index_select(0, run)
    # All pages are full but a tail's last; without a tail nothing is added anywhere.
    length = begin.new_full((len(run) + 1,), page_size)
    lacking = (in_tail - tail_pages * page_size)[:, None].expand(count.shape[:3])
    length.index_add_(0, end[..., 2].flatten(), lacking.flatten())

    by_layer = count.sum(-1, dtype=torch.int32).flatten(1)
    sizes = by_layer.sum(1).tolist()
    return list(
        map(
            HeadPages,
            page.split(sizes),
            owner.split(sizes),
            length[1:].split(sizes),
            by_layer.unbind(),
            run.split(sizes),
        )
    )


def row_pages(batch: Batch) -> list[RowPages]:
    """The head pages of each of the batch's `rows`, in all layers."""
    cache, spans = batch.cache, batch.cache.spans
    layers, heads, page_size = cache.layers, cache.heads, cache.page_size
    layer_head = torch.arange(layers * heads, device=cache.req_to_token.device)
    found = []
    for row, before, new in batch.rows:
        packed = spans.count[row].sum(0, dtype=torch.int32)
        held = packed * page_size + (before + new) - spans.begin[row, 2]
        count = (held + (page_size - 1)) // page_size
        nth = torch.arange(int(count.max()), device=count.device)
        nth = torch.minimum(nth, count[:, None] - 1)
        page = page_ids(cache, row, layer_head[:, None], nth)
        by_layer = page.unflatten(0, (layers, heads)), held.unflatten(0, (layers, heads))
        found.append(RowPages(by_layer[0], by_layer[1].tolist()))
    return found


def head_pages_reference(
    batch: Batch, nth: int, layer: int, head: int
) -> list[tuple[int, int, int]]:
    """What one head of the batch's nth request reads, one page at a time.

    Returns
    -------
    pages : (page id, KVs in it, span) in order; the tail is span 2.
    """
    cache, spans = batch.cache, batch.cache.spans
    per_block, page_size = cache.layers * cache.heads, cache.page_size
    row, layer_head = int(batch.request[nth]), layer * cache.heads + head
    begins, slots = spans.begin[row].tolist(), cache.req_to_token[row].tolist()
    left = int(batch.seq_len[nth]) - begins[2]
    found = []
    for span in range(3):
        if span == 2:
            first, count, stride = layer_head, -(-left // page_size), per_block
        else:
            first = int(spans.first[row, span, layer_head])
            count, stride = int(spans.count[row, span, layer_head]), int(spans.stride[row, span])
        for page in range(count):
            in_run, index = divmod(first + page * stride, per_block)
            block = slots[begins[span] + in_run * page_size] // page_size
            length = min(page_size, left - page * page_size) if span == 2 else page_size
            found.append((block * per_block + index, length, span))
    return found


def head_kvs_reference(
    batch: Batch, nth: int, layer: int, head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one head of the batch's nth request: float32 [n, D] and [n, Dv]."""
    pages = head_pages_reference(batch, nth, layer, head)
    keys, values = (
        torch.cat([flat[:0, 0].float(), *(flat[page, :n].float() for page, n, _ in pages)])
        for flat in (batch.cache.flat_k, batch.cache.flat_v)
    )
    return keys, values
