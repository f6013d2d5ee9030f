"""When requests that run are compressed: at their time, or when memory is short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.common import maybe_cache_unfinished_req

from sgl_kvc.cache.base import PrefixCache
from sgl_kvc.cache.continual import blocks_due, count_attention, tracked_power
from sgl_kvc.cache.held_scores import HeldScores
from sgl_kvc.cache.request import Request, decodes

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

#: So many decode steps before memory is short attention begins to count.
_STEPS_AHEAD = 64


def compress_due(cache: PrefixCache, reqs: Sequence[Req]) -> None:
    """Compress prompts, or what requests hold again, where it is due."""
    for req in reqs:
        request = Request.of(req)
        if request.segment is not None:
            if request.goes_on and not request.spec.on_pressure:
                cache.recompress(req)
            elif isinstance(request.scores, HeldScores) and request.scores.complete:
                maybe_cache_unfinished_req(req, cache)
        elif request.spec.on_pressure:
            continue
        elif request.extent is not None and request.extent.compressed and decodes(req):
            if len(req.prefix_indices) >= request.extent.scored:  # there was no room before
                cache.compress(req)
            else:
                maybe_cache_unfinished_req(req, cache)


def relieve(cache: PrefixCache, reqs: Sequence[Req], promised: int, *, once: bool) -> bool:
    """Compress requests that wait until memory is short, the least recently compressed first.

    Those that are whole, the oldest first; then again those that have gone on since
    (`_blocks_again`). Until what is free besides `promised` is enough for another step and to
    compress into, so that there is always room for that.

    Parameters
    ----------
    reqs : those that run.
    promised : tokens of whole blocks that the next decode step will take.
    once : compress one, whatever is free: somebody waits.

    Returns
    -------
    done : whether one was compressed.
    """
    _look_ahead(cache, reqs, promised)
    waiting = {req: blocks for req in reqs if (blocks := _blocks_now(cache, req, once=once))}
    order, done = sorted(waiting, key=lambda req: Request.of(req).compressed_at), False
    while order and (once or cache.free_tokens() < promised + _reserve(cache, waiting, reqs)):
        req = order.pop(0)
        whole = Request.of(req).segment is None
        done |= cache.compress(req) if whole else cache.recompress(req)
        del waiting[req]
        if once and done:
            break
    return done


def reserved_tokens(cache: PrefixCache, reqs: Iterable[Req]) -> int:
    """Tokens of whole blocks that compressing one of `reqs` takes once memory is short.

    Parameters
    ----------
    reqs : those that run, or will be prefilled now.
    """
    return cache.page_size * max((_blocks_then(cache, req) for req in reqs), default=0)


def _blocks_then(cache: PrefixCache, req: Req) -> int:
    """Blocks that `req` would be compressed to if memory were short, at most; else 0."""
    request = Request.of(req)
    extent, spec, segment = request.extent, request.spec, request.segment
    if extent is None or not extent.compressed or not spec.on_pressure:
        return 0
    if segment is None:
        return extent.segment_blocks
    whole = (req.kv_committed_len - segment.begin) // cache.page_size
    return spec.blocks_for(whole, cache.page_size) if request.goes_on else 0


def _blocks_now(cache: PrefixCache, req: Req, *, once: bool) -> int | None:
    """Blocks that `req` would be compressed to now, if it waits for that; else None."""
    request = Request.of(req)
    if request.waits_for_pressure(req):
        assert request.extent is not None
        return request.extent.segment_blocks
    if request.segment is None or not request.spec.on_pressure or not request.goes_on:
        return None
    return _blocks_again(cache, req, once=once)


def _blocks_again(cache: PrefixCache, req: Req, *, once: bool) -> int | None:
    """Blocks that `req`, which was compressed, would be compressed to again; else None.

    With `recompress_every` after so many tokens. Without, only where somebody would be retracted
    otherwise, and where a policy that goes by attention has seen a block of queries.
    """
    request, length, page = Request.of(req), req.kv_committed_len, cache.page_size
    if not request.spec.recompress_every:
        seen = length if request.counted_from is None else length - request.counted_from
        unseen = tracked_power(request.spec) and (request.counted_from is None or seen < page)
        if once or unseen:
            return None
    return blocks_due(request, page, length)


def _look_ahead(cache: PrefixCache, reqs: Sequence[Req], promised: int) -> None:
    """Count attention from now on in requests that may have to be compressed again soon.

    Not before: it slows decode down, on a GPU by a second pass over what is held.
    """
    wait = [
        req for req in reqs
        if (request := Request.of(req)).segment is not None and request.spec.on_pressure
        and request.goes_on and request.counted_from is None
    ]  # fmt: skip
    soon = promised + _STEPS_AHEAD * len(reqs)
    if wait and cache.free_tokens() < soon + reserved_tokens(cache, reqs):
        for req in wait:
            count_attention(cache, req)


def _reserve(cache: PrefixCache, waiting: Mapping[Req, int], reqs: Sequence[Req]) -> int:
    """Tokens for the step after the next, and to compress one that waits."""
    return (len(reqs) + max(waiting.values())) * cache.page_size
