"""Compression that goes on while a request decodes (arXiv 2410.00161, eq. 20).

The metric of a KV is its score from prefill plus the squared attention that every decode step
since gave it; the attention backend adds it up in ``pool.metric``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from kvc_kernels.compact import move

from sgl_kvc.policy.selection import Selection, select
from sgl_kvc.spec import CompressionSpec

if TYPE_CHECKING:
    from sgl_kvc.cache.plan import Plan
    from sgl_kvc.cache.radix import CompressingRadixCache
    from sgl_kvc.pool.arena import ArenaKVPool


def start_metric(
    pool: ArenaKVPool,
    plan: Plan,
    selection: Selection,
    target_blocks: torch.Tensor,
    tail: torch.Tensor,
) -> None:
    """Begin with the prompt's scores: of what was kept, and of the tail.

    Parameters
    ----------
    target_blocks : int64 [n], the segment's.
    tail : int64 [scored - S], slots of what was scored behind S.
    """
    scores, page = plan.scores(), pool.page_size
    layers, heads, _ = scores.shape
    head = torch.repeat_interleave(
        torch.arange(layers * heads, device=scores.device),
        selection.pages * page,
        output_size=len(selection.positions),
    )
    kept = scores.flatten(0, 1)[head, selection.positions]
    pool.metric[target_blocks] = kept.view(-1, layers, heads, page)
    pool.metric[tail // page, :, :, tail % page] = scores[..., plan.tail_begin :].permute(2, 0, 1)


def recompress(cache: CompressingRadixCache, req, spec: CompressionSpec) -> bool:
    """Compress segment and the tail's whole blocks to a new segment, if enough was decoded.

    Returns
    -------
    done : False when it is too early, or when there are no free blocks to compress into; there
        may be at a later step.
    """
    pool, row, page = cache.pool, req.req_pool_idx, cache.page_size
    length, segments = req.kv_committed_len, pool.segments
    begin, tail, end = segments.begin(row) or 0, segments.tail(row), length // page * page
    blocks = spec.blocks_for(end // page, page)
    if end - tail < max(page, spec.recompress_every) or blocks * page >= end - begin:
        return False
    note_peak(req, length - begin)
    segment = cache.allocate(blocks * page)
    if segment is None:
        return False
    slots = cache.req_to_token_pool.req_to_token[row]
    old, new_begin = slots[begin:end].clone(), end - blocks * page
    with cache.behind_forward(segment):
        held, first = _held_pages(pool, cache.req_to_token_pool.req_to_token, row, end)
        before = torch.arange(held.shape[1], device=held.device) < first[:, None]
        scores = pool.metric.flatten(0, 2)[held]
        if spec.continual == "position":  # a head's pages stand in that order
            scores = torch.arange(scores[0].numel(), device=held.device).expand(len(held), -1)
            scores = scores.view(*held.shape, page).float()
        scores.masked_fill_(before[..., None], -torch.inf)
        selection = select(
            scores.view(pool.layer_num, pool.head_num, -1),
            spec,
            blocks,
            page,
            tail=length - end,
            first=first * page,
            facts=pool.facts,
        )
        head = torch.repeat_interleave(
            torch.arange(len(held), device=held.device),
            selection.pages * page,
            output_size=len(selection.positions),
        )
        source, offset = held[head, selection.positions // page], selection.positions % page
        for arena in (pool.arena_k, pool.arena_v, pool.metric):
            move(arena, source, offset, segment[::page] // page)
        slots[begin:new_begin] = 0
        slots[new_begin:end] = segment.to(slots.dtype)
        segments.set(row, new_begin, end, selection.pages)
    cache.token_to_kv_pool_allocator.free_segment(old, start_pos=begin)
    req.cache_protected_len = new_begin
    req.kvc_report["decode"]["recompressed"] += 1
    return True


def note_peak(req, kept: int) -> None:
    """Report the most KVs a head held on average; call it when a request holds most."""
    decode = req.kvc_report.setdefault("decode", {"recompressed": 0, "kept_per_head_peak": 0})
    decode["kept_per_head_peak"] = max(decode["kept_per_head_peak"], kept)


def _held_pages(
    pool: ArenaKVPool, req_to_token: torch.Tensor, row: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The full pages of every head of a row up to `end`, at the end of a rectangle.

    By the addressing rule of `kvc_kernels.pages`, without asking the device.

    Returns
    -------
    pages : int64 [L * H, C], page ids in the arena's flat view; 0 before `first`.
    first : int64 [L * H], where each head's pages begin.
    """
    segments, page = pool.segments, pool.page_size
    begin, tail = segments.begin(row) or 0, segments.tail(row)
    tail_blocks = (end - tail) // page
    pages, start = segments.pages(row), segments.page_start[row]
    most = pages.tolist()[1] if pages else 0  # there since the step that compressed
    in_segment, per_block = start.diff(), len(start) - 1
    first = most - in_segment
    nth = torch.arange(most + tail_blocks, device=start.device) - first[:, None]
    in_tail = nth - in_segment[:, None]
    segment_page = start[:-1, None] + nth
    position = torch.where(
        in_tail < 0, begin + segment_page // per_block * page, tail + in_tail * page
    )
    head = torch.arange(per_block, device=start.device)[:, None]
    index = torch.where(in_tail < 0, segment_page % per_block, head)
    block = req_to_token[row][position.clamp(min=0)].long() // page
    return torch.where(nth >= 0, block * per_block + index, 0), first
