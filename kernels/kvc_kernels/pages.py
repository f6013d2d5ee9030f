"""Where a head's KVs lie: the addressing rule of spans (`kvc_kernels.cache.Spans`) in torch."""

from __future__ import annotations

import torch

from kvc_kernels.cache import KVCache


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
