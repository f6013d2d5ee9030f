"""Compressing a prompt: copy what is worth keeping to own blocks, let go of the tree's copy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from kvc_kernels.compact import compact

from sgl_kvc.cache import continual
from sgl_kvc.cache.base import PrefixCache
from sgl_kvc.cache.request import Request
from sgl_kvc.cache.segments import StoredSegment
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.policy.selection import Selection
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.host_copy import HostCopy
from sgl_kvc.pool.segment import Segment
from sgl_kvc.report import MAX_BITS, BlockSize, Kept, KeptByHead, Report
from sgl_kvc.spec import Extent

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_NO_ROOM = "no free blocks to compress into"
_ENDED_EARLY = "the request ended before its first token was decoded"


def begin_scoring(cache: PrefixCache, req: Req) -> None:
    """Report that `req` is not compressed yet; if its prompt will be at its end, have it scored."""
    request = Request.of(req)
    extent, tokens, pressure = request.extent, request.prompt(req), request.spec.on_pressure
    assert extent is not None
    skipped = request.unusable or extent.skipped
    if extent.compressed and not pressure:
        skipped = _ENDED_EARLY
    request.report = Report.uncompressed(len(tokens), cache.block, skipped)
    request.report.on_pressure = request.spec.rate if pressure else None
    if extent.compressed and not extent.end:
        install(cache, req, empty_segment(cache.pool, request))
    elif extent.compressed and extent.segment_blocks and not extent.prefill_block:
        layers, facts = cache.pool.layer_num, cache.pool.facts
        request.scores = PromptScores(
            request.spec, extent, tokens, cache.page_size, layers, facts, request.known
        )
        request.known = None


def compress(cache: PrefixCache, req: Req) -> bool:
    """Compress the prompt of `req`, whose scores are complete, where that frees memory.

    What others may read becomes an entry of the cache, or is one already. Without room for the
    copy the scores stay, so that it can be tried again. Where the copy would take more than it
    frees, the request stays as it is, and its report says so.

    Returns
    -------
    done : whether it is compressed now.
    """
    request = Request.of(req)
    extent, report = request.extent, request.report
    assert extent is not None
    assert report is not None
    shared = request.shares_segment(req) and _at_cut(req, extent)
    stored = cache.find_segment(req) if shared else None
    if stored is not None:  # another has made it meanwhile
        cache.hold_segment(req, stored)
        begin_reading(cache, req, stored)
        return True
    loss = _loss(cache, request, extent)
    if loss is not None:
        report.skipped, request.scores = loss, None
        request.extent = dataclasses.replace(extent, skipped=loss, compressed=False)
        return False
    if not extent.segment_blocks:
        install(cache, req, empty_segment(cache.pool, request))
        return True
    slots = cache.allocate(extent.segment_blocks * cache.page_size)
    if slots is None:
        report.skipped = _NO_ROOM
        return False
    row_slots = cache.row_slots(req)
    with cache.behind_forward(slots):
        segment, selection = _copy(cache.pool, request, row_slots, slots)
        if request.goes_on and continual.tracked_power(request.spec):
            continual.start_metric(cache.pool, request, selection, segment, row_slots)
    if shared or request.reuses(req):
        stored = cache.store_segment(req, segment)
        cache.hold_segment(req, stored)
        begin_reading(cache, req, stored)
    else:
        install(cache, req, segment)
    return True


def begin_reading(cache: PrefixCache, req: Req, stored: StoredSegment) -> None:
    """Have `req`, which holds the lock on `stored`, read it, and report it."""
    request, segment = Request.of(req), stored.segment
    assert request.extent is not None
    with cache.behind_forward():
        cache.point_row(req, segment)
    if request.stored is not None:
        request.stored.readers -= 1
    request.segment, request.stored, request.scores = segment, stored, None
    stored.readers += 1
    request.report = _compressed(request, request.extent, segment, cache.block)
    request.report.begun = request.begun
    if request.pin is not None and cache.pin_segment(stored, request.pin.expires):
        request.report.pinned = stored.name


def install(cache: PrefixCache, req: Req, segment: Segment) -> None:
    """Have `req` read `segment`, its own, instead of what it stands for, and report it."""
    request = Request.of(req)
    extent = request.extent
    assert extent is not None
    with cache.behind_forward():
        cache.point_row(req, segment)
    if request.spec.recompress_every and request.goes_on:
        continual.count_attention(cache, req)
    cache.hold_only(req, segment.begin)
    req.cache_protected_len = segment.row_begin
    if request.goes_on and request.spec.continual == "rescored" and request.scores is not None:
        request.states = request.scores.states
    request.segment, request.scores = segment, None
    request.report = _compressed(request, extent, segment, cache.block)
    request.report.on_pressure = request.spec.rate if request.spec.on_pressure else None
    if request.spec.explain:
        request.report.explain = _kept_by_head(cache.pool, segment)


def empty_segment(pool: ArenaKVPool, request: Request) -> Segment:
    """A segment without blocks: nothing is compressed yet, but all that follows may be."""
    extent = request.extent
    assert extent is not None
    nothing = torch.zeros(0, dtype=torch.int64, device=pool.device)
    pages = torch.zeros(pool.layer_num * pool.head_num, dtype=torch.int64, device=pool.device)
    return Segment(extent.begin, extent.begin, nothing, pages, pool.page_size, request.spec)


def _copy(
    pool: ArenaKVPool, request: Request, row_slots: torch.Tensor, slots: torch.Tensor
) -> tuple[Segment, Selection]:
    """Copy the KVs that the heads keep into blocks that hold nothing yet.

    Parameters
    ----------
    row_slots : integer [n], the request's row of ``req_to_token``; read up to the extent's end.
    slots : int64 [blocks * P], whole blocks to fill, as many as the extent says.

    Returns
    -------
    The segment, which no row reads yet, and what was selected.
    """
    extent, scores = request.extent, request.scores
    assert extent is not None
    assert isinstance(scores, PromptScores)
    selection, page = scores.select(), pool.page_size
    source, target = row_slots[: extent.end].clone(), slots[::page] // page
    compact(pool.arena_k, pool.arena_v, source, selection.positions, selection.pages, target)
    bitmap, bits = None, len(selection.pages) * (extent.end - extent.begin)
    if request.spec.explain and bits <= MAX_BITS:
        bitmap = HostCopy(selection.bitmap(extent.begin, extent.end, page))
    segment = Segment(
        extent.begin, extent.end, slots, selection.pages, page, request.spec, bitmap=bitmap
    )
    return segment, selection


def _at_cut(req: Req, extent: Extent) -> bool:
    """Whether nothing was read yet of what follows the tokens that are compressed.

    Without room for the segment it was, and that over the full cache: what then lies behind the
    segment is not what another request would find there.
    """
    return len(req.get_fill_ids()) == extent.cut


def _loss(cache: PrefixCache, request: Request, extent: Extent) -> str | None:
    """Why compressing would take more memory than it frees; None where it does not.

    A request that is compressed again while it decodes needs blocks of its own in any case, but
    not where memory is short.
    """
    if request.spec.force or (request.goes_on and not request.spec.on_pressure):
        return None
    begin, end = extent.begin // cache.page_size, extent.end // cache.page_size
    held = cache.sharing.share(request, begin, end)
    if extent.segment_blocks <= held:
        return None
    return (
        f"compressed it would hold {extent.segment_blocks} blocks of its own; its share of the "
        f"{end - begin} it holds together with others is {held:.1f} (prefix_tokens keeps "
        "what is shared)"
    )


def _kept_by_head(pool: ArenaKVPool, segment: Segment) -> KeptByHead:
    return KeptByHead(
        pool.layer_num, pool.head_num, segment.begin, segment.end, segment.page_counts,
        segment.bitmap,
    )  # fmt: skip


def _compressed(
    request: Request, extent: Extent, segment: Segment, block: BlockSize
) -> Report:
    tail = extent.prompt_tokens - segment.end
    tail_blocks = -(-tail // block.tokens)
    always = segment.begin + tail
    kept = Kept(always, always + len(segment.slots), segment.page_bounds)
    return Report(
        extent.prompt_tokens,
        block,
        kept,
        before=segment.end // block.tokens + tail_blocks,
        own=segment.blocks + tail_blocks,
        shared=segment.begin // block.tokens,
        policy=request.spec.policy,
        rate=request.spec.rate,
        recompressed=0 if request.goes_on else None,
        bounded=request.bounded,
    )
