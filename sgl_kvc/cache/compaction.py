"""Copying what is worth keeping: from scores to a segment in blocks of its own."""

from __future__ import annotations

import torch
from kvc_kernels.compact import compact

from sgl_kvc.cache.request import Request
from sgl_kvc.policy.selection import Selection
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.segment import Segment


def compact_prompt(
    pool: ArenaKVPool, request: Request, row_slots: torch.Tensor, slots: torch.Tensor
) -> tuple[Segment, Selection]:
    """Copy the KVs that the heads of a prompt keep into blocks that hold nothing yet.

    Parameters
    ----------
    request : its scores are complete.
    row_slots : integer [n], the request's row of ``req_to_token``; read up to the extent's end.
    slots : int64 [blocks * P], whole blocks to fill, as many as the extent says.

    Returns
    -------
    The segment, which no row reads yet, and what was selected.
    """
    extent, scores = request.extent, request.scores
    assert extent is not None
    assert scores is not None
    page = pool.page_size
    selection = scores.select()
    source = row_slots[: extent.end].clone()
    target = slots[::page] // page
    compact(
        pool.arena_k, pool.arena_v, source, selection.positions, selection.pages, target
    )
    segment = Segment(extent.begin, extent.end, slots, selection.pages, page, request.spec)
    return segment, selection


def empty_segment(pool: ArenaKVPool, request: Request) -> Segment:
    """A segment without blocks: nothing of the prompt is compressed, but all that follows may be."""
    extent = request.extent
    assert extent is not None
    assert extent.begin == extent.end
    nothing = torch.zeros(0, dtype=torch.int64, device=pool.device)
    pages = torch.zeros(pool.layer_num * pool.head_num, dtype=torch.int64, device=pool.device)
    return Segment(extent.end, extent.end, nothing, pages, pool.page_size, request.spec)
