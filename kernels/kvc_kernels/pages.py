"""Where a request's KVs lie: the addressing rule of segment and tail, for a batch."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Rows:
    """The requests of a batch, as tensors of the engine and of the segment table.

    Attributes
    ----------
    req_to_token : int32 [N, max_context], the slot of every position of every request.
    request : int64 [B], row of each request in `req_to_token` and in the segment table.
    seq_len : int64 [B], KVs a request has had so far, kept or not.
    segment_begin, tail_begin : int64 [B], the F and S of the addressing rule.
    page_start : int64 [B, L*H + 1], first page of each head within the segment.
    """

    req_to_token: torch.Tensor
    request: torch.Tensor
    seq_len: torch.Tensor
    segment_begin: torch.Tensor
    tail_begin: torch.Tensor
    page_start: torch.Tensor


@dataclasses.dataclass(frozen=True)
class HeadPages:
    """The head pages that one layer of a batch reads, ragged over (request, head).

    Attributes
    ----------
    page : int64 [N], page id in the arena's flat view [num_blocks * L * H, P, D].
    owner : int64 [N], ``request_in_batch * H + head``, ascending.
    length : int64 [N], KVs that count in the page, 1 to P.
    count : int64 [B * H], pages of every owner.
    """

    page: torch.Tensor
    owner: torch.Tensor
    length: torch.Tensor
    count: torch.Tensor


def head_pages(rows: Rows, layers: int, heads: int, page_size: int) -> list[HeadPages]:
    """The head pages of every request and head, in order, one entry a layer.

    A head's KVs are its pages of the segment, all full, then the tail's ordinary blocks::

        segment page v   block row[F + (v // LH) * P] // P, index v % LH in it
        tail page t      block row[S + t * P] // P, index layer * H + head in it

    All layers at once: this is many small steps, and a decode step should take them once.
    """
    per_block, requests = layers * heads, len(rows.request)
    in_order = (layers, requests, heads)
    start = rows.page_start[:, :-1].view(requests, layers, heads).transpose(0, 1)
    in_segment = rows.page_start.diff().view(requests, layers, heads).transpose(0, 1)
    in_tail = (rows.seq_len - rows.tail_begin + page_size - 1) // page_size
    count = in_segment + in_tail[:, None]

    flat_count = count.flatten()
    nth_owner = torch.arange(len(flat_count), device=flat_count.device)
    owner = torch.repeat_interleave(nth_owner, flat_count)
    nth = torch.arange(len(owner), device=owner.device)
    nth -= (flat_count.cumsum(0) - flat_count)[owner]
    layer_head = nth_owner.view(in_order) // (requests * heads) * heads + nth_owner[:heads]
    batch = owner // heads % requests
    tail_page = nth - in_segment.flatten()[owner]
    segment_page = start.flatten()[owner] + nth
    tail_position = rows.tail_begin[batch] + tail_page * page_size
    is_tail = tail_page >= 0

    position = torch.where(
        is_tail,
        tail_position,
        rows.segment_begin[batch] + segment_page // per_block * page_size,
    )
    block = rows.req_to_token[rows.request[batch], position].long() // page_size
    index = torch.where(is_tail, layer_head.flatten()[owner], segment_page % per_block)
    page = block * per_block + index
    length = torch.where(
        is_tail, (rows.seq_len[batch] - tail_position).clamp(max=page_size), page_size
    )
    sizes = count.sum(dim=(1, 2)).tolist()
    of_layer = zip(page.split(sizes), owner.split(sizes), length.split(sizes), strict=True)
    return [
        HeadPages(pages, owners - layer * requests * heads, lengths, count[layer].flatten())
        for layer, (pages, owners, lengths) in enumerate(of_layer)
    ]
