"""The requests of one forward, and the head pages they read."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import torch

from kvc_kernels.cache import KVCache
from kvc_kernels.pages import span_pages


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


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The requests of one forward.

    Attributes
    ----------
    cache : what they read.
    request : integer [B], rows of the cache's tables.
    seq_len : integer [B], KVs each request has had so far, kept or not, this forward's included.
    new : new tokens of every request, on the host. Only for a prefill.
    rows : for every request its row, its KVs before this forward, and its new tokens; on the
        host. Only for a prefill on a CPU.
    """

    cache: KVCache
    request: torch.Tensor
    seq_len: torch.Tensor
    new: list[int] | None = None
    rows: list[tuple[int, int, int]] | None = None

    def __post_init__(self):
        if len(self.request) != len(self.seq_len):
            raise ValueError(f"{len(self.seq_len)} lengths for {len(self.request)} requests")

    @functools.cached_property
    def start(self) -> torch.Tensor:
        """Where each request's new tokens begin in the query, and their number; int64 [B + 1].

        Sent to the device when it is first asked for, without waiting.
        """
        assert self.new is not None
        begins = torch.tensor([0, *itertools.accumulate(self.new)])
        return begins.to(self.request.device, non_blocking=True)

    @functools.cached_property
    def runs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a forward reads, counted (`_runs`); worked out once."""
        return _runs(self)

    @functools.cached_property
    def head_pages(self) -> list[HeadPages]:
        """The pages of every request and head, one entry a layer; worked out once for all."""
        return _head_pages(self)

    @functools.cached_property
    def held(self) -> list[list[list[int]]]:
        """KVs of every request and head, ``held[layer][request][head]``; worked out once."""
        _, in_tail, count = self.runs
        in_spans = count[..., :2].sum(-1) * self.cache.page_size
        return (in_spans + in_tail[:, None]).tolist()

    def tracked_pages(self, tracked: torch.Tensor) -> list[torch.Tensor]:
        """Which head pages belong to requests whose `tracked` (int32 [rows]) is not 0.

        None of shared spans. Worked out once for all layers that ask with the same tensor.

        Returns
        -------
        chosen : of every layer int64 [M], indices into its `HeadPages`.
        """
        known = self.__dict__.get("_tracked")
        if known is None or known[0] is not tracked:
            known = self.__dict__["_tracked"] = tracked, _tracked_pages(self, tracked)
        return known[1]


def _runs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def _head_pages(batch: Batch) -> list[HeadPages]:
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


def _tracked_pages(batch: Batch, tracked: torch.Tensor) -> list[torch.Tensor]:
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
