"""The next turn of a chat begins with what the turn before has left, and is compressed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_kvc.cache.base import PrefixCache
from sgl_kvc.cache.compaction import begin_reading
from sgl_kvc.cache.held_scores import HeldScores
from sgl_kvc.cache.repack import held_pages, repack
from sgl_kvc.cache.request import Request

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def prepare_turn(cache: PrefixCache, req: Req) -> None:
    """Have the new tokens of `req`, which reads a stored segment, score all that it will hold.

    Only where it would hold more than its budget otherwise.
    """
    request = Request.of(req)
    extent, segment = request.extent, request.segment
    assert extent is not None
    assert segment is not None
    held = segment.blocks + (extent.end - segment.end) // cache.page_size
    if request.reuses(req) and extent.segment_blocks < held:
        kept = extent.segment_blocks * cache.page_size
        request.scores = HeldScores(
            cache.pool, req.req_pool_idx, segment, request.spec, extent.end, extent.scored, kept
        )


def compress_turn(cache: PrefixCache, req: Req) -> bool:
    """Compress segment and tail of `req`, whose prompt is prefilled, to its own budget.

    ::

        before   [ prefix )[ released )[ segment )[ tail, the tree's . . . )[ own )
                 0        begin        F          S                        end   length
        after    [ prefix )[ released . . . . . . )[ new segment . . . . . )[ own )

    What it has read so far stays in the tree, for others and until it is evicted.

    Returns
    -------
    done : False where it need not be, or where there is no room: then it goes on as it is.
    """
    request, pool, page = Request.of(req), cache.pool, cache.page_size
    scores, extent, stored = request.scores, request.extent, request.stored
    if not isinstance(scores, HeldScores) or not scores.complete:
        return False
    assert extent is not None
    assert stored is not None
    request.scores = None
    slots = cache.allocate(extent.segment_blocks * page)
    if slots is None:
        return False
    old = stored.segment
    with cache.behind_forward(slots):
        pages, first = held_pages(pool, req.req_pool_idx, old, extent.end)
        found = scores.rectangle(pages.shape[1] * page).view(*pages.shape, page)
        new, _ = repack(
            pool, request.spec, old, extent.end, extent.scored, pages, first, found, slots
        )
    kept = cache.store_segment(req, new)
    cache.hold_segment(req, kept)
    begin_reading(cache, req, kept)
    return True
