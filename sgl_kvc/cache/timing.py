"""When requests that run are compressed: at their time, or when memory is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.common import maybe_cache_unfinished_req

from sgl_kvc.cache.base import PrefixCache
from sgl_kvc.cache.continual import blocks_due
from sgl_kvc.cache.held_scores import HeldScores
from sgl_kvc.cache.request import Request, decodes

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


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

    Those that are whole, the oldest first; then again those that have gone on so long
    (`recompress_every`). Until what is free besides `promised` is enough for another step and to
    compress into, so that there is always room for that.

    Parameters
    ----------
    reqs : those that run.
    promised : tokens of whole blocks that the next decode step will take.
    once : compress one, whatever is free.

    Returns
    -------
    done : whether one was compressed.
    """
    waiting = {req: blocks for req in reqs if (blocks := _blocks_on_pressure(cache, req))}
    order, done = sorted(waiting, key=lambda req: Request.of(req).compressed_at), False
    while order and (
        once or cache.free_tokens() < promised + _reserve(cache, waiting, reqs)
    ):
        req = order.pop(0)
        whole = Request.of(req).segment is None
        done |= cache.compress(req) if whole else cache.recompress(req)
        del waiting[req]
        if once and done:
            break
    return done


def _blocks_on_pressure(cache: PrefixCache, req: Req) -> int | None:
    """Blocks that `req` would be compressed to now, if it waits for that; else None."""
    request = Request.of(req)
    if request.waits_for_pressure(req):
        assert request.extent is not None
        return request.extent.segment_blocks
    if request.segment is not None and request.spec.on_pressure and request.goes_on:
        return blocks_due(request, cache.page_size, req.kv_committed_len)
    return None


def _reserve(cache: PrefixCache, waiting: Mapping[Req, int], reqs: Sequence[Req]) -> int:
    """Tokens for the step after the next, and to compress one that waits."""
    return (len(reqs) + max(waiting.values())) * cache.page_size
