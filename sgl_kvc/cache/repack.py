"""Segment and tail of a request become a new segment: its heads hold different numbers of KVs."""

from __future__ import annotations

import torch
from kvc_kernels.compact import move
from kvc_kernels.pages import page_ids

from sgl_kvc.policy.selection import Selection, select
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.segment import Segment
from sgl_kvc.spec import CompressionSpec


def repack(
    pool: ArenaKVPool,
    spec: CompressionSpec,
    old: Segment,
    end: int,
    length: int,
    pages: torch.Tensor,
    first: torch.Tensor,
    scores: torch.Tensor,
    slots: torch.Tensor,
    *,
    metric: bool = False,
    in_place: bool = False,
) -> tuple[Segment, Selection]:
    """Copy the best of `old` and of the tail up to `end` into other blocks, or into their own.

    Parameters
    ----------
    end, length : where the new segment ends, a block boundary, and tokens so far.
    pages, first : `held_pages` up to `end`.
    scores : float32 [L * H, C, P], of their KVs. Overwritten.
    slots : int64 [n * P], whole blocks to fill. They hold nothing yet.
    metric : whether what decode adds up for each KV goes along.
    in_place : `slots` are of the blocks that are copied from.

    Returns
    -------
    A segment that no row reads yet, and what was selected: positions count in the rectangle.
    """
    page = pool.page_size
    scores.masked_fill_(~holds_page(pages, first)[..., None], -torch.inf)
    selection = select(
        scores.view(pool.layer_num, pool.head_num, -1),
        spec,
        len(slots) // page,
        page,
        tail=length - end,
        before=old.begin,
        first=first * page,
        facts=pool.facts,
    )
    head = selection.owners(page)
    source, offset = pages[head, selection.positions // page], selection.positions % page
    arenas = [pool.arena_k, pool.arena_v]
    if metric:
        arenas.append(pool.metric)
    for arena in arenas:
        move(arena, source, offset, slots[::page] // page, in_place=in_place)
    return Segment(old.begin, end, slots, selection.pages, page, spec), selection


def holds_page(pages: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """bool [L * H, C], where the rectangle of `held_pages` has a page."""
    return torch.arange(pages.shape[1], device=pages.device) >= first[:, None]


def held_pages(
    pool: ArenaKVPool, row: int, segment: Segment, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The full pages of every head of a row behind ``segment.begin`` and up to `end`.

    They stand at the end of a rectangle, since heads hold different numbers.

    Returns
    -------
    pages : int64 [L * H, C], page ids in the arena's flat view; 0 before `first`.
    first : int64 [L * H], where each head's pages begin.
    """
    tail_blocks = (end - segment.end) // pool.page_size
    most = segment.page_bounds.tolist()[1]  # there since the step that compressed
    first = most - segment.pages
    nth = torch.arange(most + tail_blocks, device=first.device) - first[:, None]
    shared = segment.begin // pool.page_size
    head = torch.arange(len(first), device=first.device)[:, None]
    ids = page_ids(pool.cache, row, head, shared + nth.clamp(min=0))
    return torch.where(nth >= 0, ids, 0), first
