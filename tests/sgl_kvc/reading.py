"""What the requests of a `World` read: whose KVs, and of which positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from kvc_kernels.batch import Batch
from sglang.srt.managers.schedule_batch import Req

from sgl_kvc.cache.request import Request
from tests.sgl_kvc.lives import (
    CONTEXT,
    DIM,
    HEADS,
    LAYERS,
    NUMBERED,
    PAGE,
    World,
    numbers,
    tokens_of,
)


@dataclasses.dataclass(frozen=True)
class Held:
    """The KVs that requests hold, those of a head one after the other.

    Attributes
    ----------
    reqs : the requests.
    position : int64 [n], ascending within a head.
    owner : int64 [n], ``(layer * len(reqs) + request) * HEADS + head``.
    request : int64 [n], which of `reqs`.
    """

    reqs: Sequence[Req]
    position: torch.Tensor
    owner: torch.Tensor
    request: torch.Tensor

    def count(self, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """KVs at positions from `begin` [B] to `end` [B]: [B, LAYERS * HEADS]."""
        inside = self.position >= begin[self.request]
        inside &= self.position < end[self.request]
        found = self.owner[inside].bincount(minlength=LAYERS * len(self.reqs) * HEADS)
        return found.view(LAYERS, -1, HEADS).transpose(0, 1).flatten(1)

    def lists(self) -> list[list[list[int]]]:
        """The positions of every request, layer and head."""
        kept = self.owner.bincount(minlength=LAYERS * len(self.reqs) * HEADS).tolist()
        heads = [each.tolist() for each in self.position.split(kept)]
        return [
            [heads[(layer * len(self.reqs) + i) * HEADS + head]
             for layer in range(LAYERS) for head in range(HEADS)]
            for i in range(len(self.reqs))
        ]  # fmt: skip


def held(world: World, reqs: Sequence[Req]) -> Held:
    """What each layer and head of `reqs` reads; all of it has to be the request's own."""
    lengths = [req.kv_committed_len for req in reqs]
    rows = torch.tensor([req.req_pool_idx for req in reqs])
    batch = Batch(world.pool.cache, rows, torch.tensor(lengths))
    layers = batch.head_pages
    page = torch.cat([each.page for each in layers])
    owner = torch.cat([each.owner + i * len(reqs) * HEADS for i, each in enumerate(layers)]).cpu()
    here = ~torch.cat([each.absent for each in layers]).cpu()
    keys, values = world.pool.flat_k[page].cpu(), world.pool.flat_v[page].cpu()
    nth = owner // HEADS // len(reqs) * HEADS + owner % HEADS  # of the layer and head
    index = nth[:, None] * DIM + torch.arange(DIM, device="cpu")
    found = keys - index[:, None] / 64
    same = (keys == -values).all(-1) & (found == found[..., :1]).all(-1)
    number = found[..., 0].long().clamp(0, len(NUMBERED) - 1)
    place = NUMBERED[number]
    expected = torch.full((len(reqs), CONTEXT), -1, device="cpu")
    for mine, req, length in zip(expected, reqs, lengths, strict=True):
        mine[:length] = torch.tensor(numbers(tokens_of(req)[:length]), device="cpu")
    request = owner // HEADS % len(reqs)
    same &= expected[request[:, None], place] == found[..., 0]
    assert bool(same[here].all()), "a KV of somebody else"
    owner, position = owner[:, None].expand_as(here)[here], place[here]
    next_head = owner.diff() != 0
    assert bool((next_head | (position.diff() > 0)).all()), "not ascending"
    return Held(reqs, position, owner, owner // HEADS % len(reqs))


def check(world: World) -> None:
    """Every request reads its own KVs: all of them, or the kept ones and what lies around."""
    reqs = world.live
    found = held(world, reqs)
    lengths = torch.tensor([req.kv_committed_len for req in reqs], device="cpu")
    segments = [Request.of(req).segment for req in reqs]
    edges = [(each.begin, each.end) if each else (CONTEXT, CONTEXT) for each in segments]
    begin, end = torch.tensor(edges, device="cpu").minimum(lengths[:, None]).unbind(1)
    zero = torch.zeros_like(begin)
    always = found.count(zero, begin) + found.count(end, lengths)
    assert bool((always == (begin + lengths - end)[:, None]).all()), "what is kept in any case"
    for req, kept in zip(reqs, found.count(zero, lengths).tolist(), strict=True):
        _as_reported(req, kept)
    _protected(found)


def _as_reported(req: Req, kept: list[int]) -> None:
    """The KVs that every head holds are as many as `req` reports."""
    request, length = Request.of(req), req.kv_committed_len
    segment, report = request.segment, request.report.to_json()
    if segment is None:
        assert set(kept) == {length}
        return
    always = segment.begin + length - segment.end
    assert sum(kept) == (always + len(segment.slots)) * LAYERS * HEADS
    if report.get("decode", {}).get("recompressed"):
        return
    decoded = length - report["prompt_tokens"]
    assert report["kept_per_head"]["min"] == min(kept) - decoded
    assert report["kept_per_head"]["max"] == max(kept) - decoded
    assert report["blocks"]["shared"] == request.extent.begin // PAGE
    if segment.end == request.extent.end:  # else no room to compress a chat's turn again
        assert segment.blocks <= request.extent.segment_blocks
        assert segment.blocks == request.extent.segment_blocks or request.reuses(req)


def _protected(found: Held) -> None:
    """Sinks and recent positions are kept where the budget holds them."""
    edges = [_protected_edges(req) for req in found.reqs]
    sinks_from, sinks_to, last_from, last_to = torch.tensor(edges, device="cpu").unbind(1)
    sinks, last = found.count(sinks_from, sinks_to), found.count(last_from, last_to)
    inside = found.count(sinks_from, last_to)
    holds = inside >= (sinks_to - sinks_from + last_to - last_from)[:, None]
    assert bool((~holds | (sinks == (sinks_to - sinks_from)[:, None])).all()), "sinks"
    assert bool((~holds | (last == (last_to - last_from)[:, None])).all()), "recent"


def _protected_edges(req: Req) -> tuple[int, int, int, int]:
    """From where to where the sinks of what is compressed lie, and its recent positions."""
    request = Request.of(req)
    extent, spec, segment = request.extent, request.spec, request.segment
    told = request.report.recompressed or request.reuses(req)
    if segment is None or segment.end != extent.end or told:
        return 0, 0, 0, 0
    recent = min(spec.recent, len(segment.slots) // 4)
    sinks = min(extent.begin + max(0, spec.sinks - extent.begin), extent.end)
    last = min(max(extent.begin, extent.scored - recent), extent.end)
    return extent.begin, sinks, last, extent.end
