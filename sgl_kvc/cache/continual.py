"""Compression that goes on while a request decodes (arXiv 2410.00161, eq. 20).

The metric of a KV is its score from prefill plus the squared attention that every decode step
since gave it (H2O: the attention itself); decode adds it up in ``pool.metric``. For scorers that
score anew what is held (R-KV) the metric is what the last queries before it paid, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_kvc.cache.base import PrefixCache
from sgl_kvc.cache.repack import held_pages, holds_page, repack
from sgl_kvc.cache.request import Request
from sgl_kvc.policy.base import HeldContext, scorer
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.policy.selection import Selection
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.segment import Segment
from sgl_kvc.spec import CompressionSpec

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def tracked_power(spec: CompressionSpec) -> int:
    """The power of what decode's queries pay that counts when `spec` compresses again; 0: none."""
    powers = {"attention": 1, "squared attention": 2, "rescored": 1}
    return powers.get(spec.continual or "", 0)


def start_metric(
    pool: ArenaKVPool,
    request: Request,
    selection: Selection,
    segment: Segment,
    row_slots: torch.Tensor,
) -> None:
    """Begin with the prompt's scores: of what was kept, and of what was scored behind it.

    With scores made anew in decode, begin with nothing.

    Parameters
    ----------
    row_slots : integer [n], the request's row of ``req_to_token``.
    """
    assert isinstance(request.scores, PromptScores)
    assert request.extent is not None
    page, extent = pool.page_size, request.extent
    kept, behind = request.scores.scores_of(selection)
    if request.spec.continual == "rescored":
        kept, behind = torch.zeros_like(kept), torch.zeros_like(behind)
    blocks = segment.slots[::page] // page
    pool.metric[blocks] = kept.view(-1, pool.layer_num, pool.head_num, page)
    tail = row_slots[extent.end : extent.scored].long()
    pool.metric[tail // page, :, :, tail % page] = behind.permute(2, 0, 1)


def count_attention(cache: PrefixCache, req: Req) -> None:
    """Have decode add what queries pay from now on to the metric of what `req` holds.

    The metric of what was decoded before begins at zero. Nothing is counted where the policy does
    not go by attention.
    """
    request, power = Request.of(req), tracked_power(Request.of(req).spec)
    assert request.extent is not None
    request.counted_from = req.kv_committed_len
    if power:
        with cache.behind_forward():
            behind = cache.row_slots(req)[request.extent.scored : req.kv.kv_allocated_len]
            cache.pool.reset_metric(behind.long())
            cache.pool.spans.track(req.req_pool_idx, power)


def recompress(cache: PrefixCache, req: Req) -> bool:
    """Compress segment and the tail's whole blocks to a new segment, if enough was decoded.

    ::

        before   [ the tree's )[ released )[ segment )[ tail . . . . . . . . )
                 0            begin        F         S             end      length
        after    [ the tree's )[ released . . . )[ new segment )[ new tail . )
                 0            begin             F'            S' = end      length

    Returns
    -------
    done : False when it is too early, or when there are no free blocks to compress into; there
        may be at a later step.
    """
    request, pool, page = Request.of(req), cache.pool, cache.page_size
    spec, segment, report = request.spec, request.segment, request.report
    assert segment is not None
    assert report is not None
    length = req.kv_committed_len
    if spec.continual == "rescored" and _is_first_due(request, page, length + spec.window):
        with cache.behind_forward():
            _forget_attention(cache, req, segment, length)
    blocks = blocks_due(request, page, length)
    if blocks is None:
        return False
    end = length // page * page
    report.note_peak(length - segment.row_begin + segment.begin)
    slots = cache.allocate(blocks * page)
    if slots is None:
        return False
    old = cache.row_slots(req)[segment.row_begin : end].clone()
    with cache.behind_forward(slots):
        pages, first = held_pages(pool, req.req_pool_idx, segment, end)
        if spec.continual == "position":  # a head's pages stand in that order
            scores = torch.arange(pages[0].numel() * page, device=pages.device).float()
            scores = scores.view(1, -1, page).repeat(len(pages), 1, 1)
        elif spec.continual == "rescored":
            held = holds_page(pages, first)
            scores = _rescored(pool, request, pages, held, length).view(*pages.shape, page)
        else:
            scores = pool.metric.flatten(0, 2)[pages]
        new, _ = repack(
            pool, spec, segment, end, length, pages, first, scores, slots,
            metric=bool(tracked_power(spec)),
        )  # fmt: skip
        cache.point_row(req, new)
        if spec.continual == "rescored":
            _forget_attention(cache, req, new, length)
    cache.token_to_kv_pool_allocator.free_segment(old, start_pos=segment.row_begin)
    req.cache_protected_len = new.row_begin
    request.segment = new
    report.recompressed = (report.recompressed or 0) + 1
    return True


def blocks_due(request: Request, page: int, length: int) -> int | None:
    """Blocks to compress to at a `length`; None where it is too early or nothing would be freed."""
    spec, segment = request.spec, request.segment
    assert segment is not None
    end = length // page * page
    blocks = spec.blocks_for((end - segment.begin) // page, page)
    early = end - segment.end < max(page, spec.recompress_every)
    return None if early or blocks * page >= end - segment.row_begin else blocks


def _is_first_due(request: Request, page: int, length: int) -> bool:
    """Whether it is due at this length, and not before."""
    due = (blocks_due(request, page, each) is not None for each in (length - 1, length))
    return tuple(due) == (False, True)


def _forget_attention(cache: PrefixCache, req: Req, segment: Segment, length: int) -> None:
    """Zero the metric of all that the request alone holds, up to a `length`."""
    slots = cache.row_slots(req)[segment.row_begin : length : cache.page_size]
    cache.pool.metric[slots.long() // cache.page_size] = 0


def _rescored(
    pool: ArenaKVPool, request: Request, pages: torch.Tensor, held: torch.Tensor, length: int
) -> torch.Tensor:
    """What the scorer's `rescore` says of the pages [L * H, C] that are `held`: [L * H, C * P]."""
    spec, states = request.spec, request.states or [None] * pool.layer_num
    rescore = scorer(spec).rescore
    assert rescore is not None
    heads, places = pool.head_num, held.repeat_interleave(pool.page_size, dim=1)
    scores = []
    for mine, there, state in zip(pages.split(heads), places.split(heads), states, strict=True):
        keys, attention = pool.read_pages(mine), pool.metric.flatten(0, 2)[mine].flatten(1)
        context = HeldContext(keys, there, attention, length, spec, pool.facts, state)
        scores.append(rescore(context))
    return torch.cat(scores)
