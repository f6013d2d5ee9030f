"""Where a head's KVs lie: the addressing rule of spans (`kvc_kernels.cache.Spans`) in torch."""

from __future__ import annotations

import dataclasses
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
    absent : bool [N, P], places of the page without a KV; the last ones.
    """

    page: torch.Tensor
    owner: torch.Tensor
    absent: torch.Tensor


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
    place = torch.addcmul(first, nth, stride)
    in_run = place // per_block
    slot = cache.req_to_token.take(torch.add(begin, in_run, alpha=page_size))
    # block * per_block + place % per_block, in fewer steps
    return torch.add(place, (slot // page_size - in_run).long(), alpha=per_block)


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


def runs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a forward reads, counted.

    Returns
    -------
    begin : int32 [B, 3], as in `Spans`.
    in_tail : int32 [B], KVs in the tail.
    count : int32 [L, B, H, 3], pages of every head in the two spans and the tail.
    """
    cache, spans, request = batch.cache, batch.cache.spans, batch.request.long()
    layers, heads, page_size = cache.layers, cache.heads, cache.page_size
    begin = spans.begin.index_select(0, request)
    in_tail = batch.seq_len.int() - begin[:, 2]
    count = begin.new_empty(layers, len(request), heads, 3)
    by_head = spans.count.index_select(0, request).view(-1, 2, layers, heads)
    count[..., :2] = by_head.permute(2, 0, 3, 1)
    count[..., 2] = ((in_tail + (page_size - 1)) // page_size)[:, None]
    return begin, in_tail, count


def head_pages(batch: Batch) -> list[HeadPages]:
    """The head pages of every request and head, in order, one entry a layer.

    All layers at once: this is many small steps, and a forward should take them once. A run
    is what a head of a request has in one span or in the tail; there are [L, B, H, 3].
    """
    cache, spans = batch.cache, batch.cache.spans
    layers, heads, page_size = cache.layers, cache.heads, cache.page_size
    request, owners = batch.request.long(), len(batch.request) * heads
    begin, in_tail, count = batch.runs
    runs = count.shape
    first, stride = count.new_empty(2, *runs)
    by_head = spans.first.index_select(0, request).view(-1, 2, layers, heads)
    first[..., :2] = by_head.permute(2, 0, 3, 1)
    first[..., 2] = torch.arange(layers * heads, device=count.device).view(layers, 1, heads)
    stride[..., :2] = spans.stride.index_select(0, request)[:, None]
    stride[..., 2] = layers * heads
    start = torch.add(begin, request[:, None], alpha=cache.req_to_token.shape[1])
    start, tail_pages = start[:, None].expand(runs).flatten(), count[..., 2]
    count, first, stride = count.view(-1), first.view(-1), stride.view(-1)
    end = count.cumsum(0, dtype=torch.int32)
    # So that pages may be counted from 0 over all runs.
    first.addcmul_(end - count, stride, value=-1)

    run = torch.repeat_interleave(count)
    page = span_pages(
        cache,
        start.index_select(0, run),
        first.index_select(0, run),
        stride.index_select(0, run),
        torch.arange(len(run), dtype=torch.int32, device=run.device),
    )
    owner = torch.arange(owners, device=run.device)[:, None].expand(layers, owners, 3)
    owner = owner.flatten().index_select(0, run)
    # All pages are full but a tail's last; without a tail nothing is added anywhere.
    length = begin.new_full((len(run) + 1,), page_size)
    lacking = torch.sub(in_tail[:, None], tail_pages, alpha=page_size)
    length.index_add_(0, end[2::3], lacking.flatten())
    absent = torch.arange(page_size, dtype=torch.int32, device=run.device) >= length[1:, None]

    sizes = count.view(layers, -1).sum(1).tolist()
    columns = (column.split(sizes) for column in (page, owner, absent))
    return [HeadPages(*of_layer) for of_layer in zip(*columns, strict=True)]


def tracked_pages(batch: Batch, tracked: torch.Tensor) -> list[torch.Tensor]:
    """Which head pages belong to requests whose `tracked` (int32 [rows]) is not 0; none of shared
    spans.

    Returns
    -------
    chosen : of every layer int64 [M], indices into its `HeadPages`.
    """
    _, _, count = batch.runs
    of_request = tracked.index_select(0, batch.request.long()) > 0
    of_run = of_request[:, None, None].repeat(count.shape[0], 1, count.shape[2], 3)
    of_run[..., 0] = False
    chosen = torch.repeat_interleave(of_run.view(-1), count.view(-1))
    sizes = [len(pages.page) for pages in batch.head_pages]
    return [of_layer.nonzero().squeeze(1) for of_layer in chosen.split(sizes)]


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
