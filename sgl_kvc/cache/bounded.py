"""A prompt that is compressed while it comes in, so that its request holds no more than a bound.

After every ``prefill_block`` tokens, segment and new tokens become a segment of the size that the
knob gives for the whole prompt. It fills the first of the very blocks that it is made of, so no
others are needed, and nothing but these is ever held::

    a chunk      [ the tree's, locked )[ released )[ segment )[ own: new tokens )
                 0                  begin           F         S               done
    a block      [ the tree's, locked )[ released . . . . . . )[ new segment    )
                 0                  begin                     F'               S'

Nothing behind `begin` goes into the tree: those KVs follow from what was kept, not from the tokens
alone. What precedes a question apart is compressed the same way at last, and stored
(`segments.py`); whoever reads it was shaped by the same ``prefill_block``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_kvc.cache.base import PrefixCache
from sgl_kvc.cache.compaction import begin_reading, empty_segment, install
from sgl_kvc.cache.held_scores import Carried, HeldScores
from sgl_kvc.cache.repack import held_pages, repack
from sgl_kvc.cache.request import Request, cannot_compress, missing_facts
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.report import BoundedPrefill
from sgl_kvc.spec import Extent

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def begin(cache: PrefixCache, req: Req) -> None:
    """The prompt of `req` is there up to where compression begins: score what follows."""
    request = Request.of(req)
    assert request.extent is not None
    request.bounded = BoundedPrefill(request.extent.prefill_block)
    install(cache, req, empty_segment(cache.pool, request))
    _score_next(cache, req, request.extent.begin, None)


def note_peak(cache: PrefixCache, req: Req) -> None:
    """A chunk of `req` has its blocks: update how many it has held at most."""
    request = Request.of(req)
    segment, bounded = request.segment, request.bounded
    assert segment is not None
    assert bounded is not None
    tail = -(-(req.extend_range.end - segment.end) // cache.page_size)
    bounded.blocks_peak = max(bounded.blocks_peak, segment.blocks + tail)


def is_due(req: Req) -> bool:
    """Whether a block of the prompt of `req` is there and was scored."""
    scores = Request.of(req).scores
    return isinstance(scores, HeldScores) and scores.complete


def compress_block(cache: PrefixCache, req: Req, done: int) -> None:
    """Compress what `req` holds, `done` tokens, which is due."""
    request = Request.of(req)
    scores, extent = request.scores, request.extent
    assert isinstance(scores, HeldScores)
    assert extent is not None
    last = done >= extent.scored
    shared = last and request.shares_segment(req) and done == extent.cut
    if shared and _read_stored(cache, req, done):
        return
    carried = _compress(cache, req, scores, done)
    if not last:
        _score_next(cache, req, done, carried)
    elif shared:
        assert request.segment is not None
        stored = cache.store_segment(req, request.segment)
        cache.hold_segment(req, stored)
        begin_reading(cache, req, stored)


def tokens_at_most(
    req: Req, page_size: int, facts: ModelFacts, *, cached: bool
) -> int | None:
    """Tokens in whole blocks that the prompt of `req`, which has not begun, will ever hold.

    None where its prefill is not bounded; it may hold all of them then.

    Parameters
    ----------
    cached : whether the server's prefix cache is on.
    """
    spec = Request.of(req).spec
    unable = cannot_compress(req, cached=cached) or missing_facts(spec, facts)
    extent = Extent.of(spec, len(req.origin_input_ids), page_size, unable=unable)
    return extent.bound * page_size if extent.prefill_block else None


def tokens_to_come(req: Req, page_size: int) -> int | None:
    """Tokens in whole blocks that the rest of the prompt of `req`, which was matched, will take.

    None where its prefill is not bounded; it may take all of them then.
    """
    request = Request.of(req)
    extent, segment, done = request.extent, request.segment, len(req.prefix_indices)
    if extent is None or not extent.prefill_block or done >= extent.prompt_tokens:
        return None
    if request.stored is not None or (segment is None and done > extent.begin):
        return None  # it reads what another has kept
    held = done
    if segment is not None:
        held += segment.begin - segment.row_begin
    return (extent.bound - held // page_size) * page_size


def _score_next(cache: PrefixCache, req: Req, done: int, carried: Carried | None) -> None:
    """Have the tokens of the next block score all that `req` will hold at its end."""
    request = Request.of(req)
    extent, segment = request.extent, request.segment
    assert extent is not None
    assert segment is not None
    cut = extent.next_cut(done)
    end, scored = (cut, cut) if cut is not None else (extent.end, extent.scored)
    kept = extent.segment_blocks * cache.page_size
    request.scores = HeldScores(
        cache.pool, req.req_pool_idx, segment, request.spec, end, scored, kept, carried
    )


def _compress(cache: PrefixCache, req: Req, scores: HeldScores, done: int) -> Carried | None:
    """Segment and new tokens of `req` become a segment, in the first of their own blocks."""
    request, pool, page = Request.of(req), cache.pool, cache.page_size
    extent, old, bounded = request.extent, request.segment, request.bounded
    assert extent is not None
    assert old is not None
    assert bounded is not None
    end, kept = done // page * page, extent.segment_blocks * page
    own = cache.row_slots(req)[old.row_begin : end].to(torch.int64, copy=True)
    with cache.behind_forward(own):
        pages, first = held_pages(pool, req.req_pool_idx, old, end)
        found = scores.rectangle(pages.shape[1] * page).view(*pages.shape, page)
        new, selection = repack(
            pool, request.spec, old, end, done, pages, first, found, own[:kept], in_place=True
        )
    cache.token_to_kv_pool_allocator.free_segment(own[kept:], start_pos=old.row_begin + kept)
    install(cache, req, new)
    bounded.compressed += 1
    return scores.carry(new, selection, first * page)


def _read_stored(cache: PrefixCache, req: Req, done: int) -> bool:
    """Have `req` read what another has stored of the same tokens meanwhile, if one has."""
    request, stored = Request.of(req), cache.find_segment(req)
    if stored is None:
        return False
    assert request.segment is not None
    begin = request.segment.row_begin
    own = cache.row_slots(req)[begin:done].clone()
    cache.token_to_kv_pool_allocator.free_segment(own, start_pos=begin)
    cache.hold_segment(req, stored)
    begin_reading(cache, req, stored)
    return True
