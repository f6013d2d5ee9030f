"""When requests that run are compressed: at their time, or when memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.common import maybe_cache_unfinished_req

from sgl_kvc.cache.base import PrefixCache
from sgl_kvc.cache.held_scores import HeldScores
from sgl_kvc.cache.request import Request, decodes

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def compress_due(cache: PrefixCache, reqs: Sequence[Req]) -> None:
    """Compress prompts, or what requests hold again, where it is due."""
    for req in reqs:
        request = Request.of(req)
        if request.segment is not None:
            if request.goes_on:
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
    """Compress, the oldest first, requests that wait until memory is short.

    Until what is free besides `promised` is enough for another step and to compress into, so that
    there is always room for that.

    Parameters
    ----------
    reqs : those that run.
    promised : tokens of whole blocks that the next decode step will take.
    once : compress one, whatever is free.

    Returns
    -------
    done : whether one was compressed.
    """
    waiting, done = [req for req in reqs if Request.of(req).waits_for_pressure(req)], False
    while waiting and (once or cache.free_tokens() < promised + _reserve(cache, waiting, reqs)):
        done |= cache.compress(waiting.pop(0))
        if once and done:
            break
    return done


def _reserve(cache: PrefixCache, waiting: Sequence[Req], reqs: Sequence[Req]) -> int:
    """Tokens for the step after the next, and to compress one that waits."""
    extents = [extent for req in waiting if (extent := Request.of(req).extent) is not None]
    return (len(reqs) + max(extent.segment_blocks for extent in extents)) * cache.page_size
