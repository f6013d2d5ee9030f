"""A model of a decode step on a GPU, event by event: what of the bandwidth its programs take.

Programs that read share the memory's bandwidth equally, each up to what it has on its way in a
latency; beginning a head is waiting. It knows nothing of caches, channels or clocks: it shows what
the cuts are worth, not what a GPU will do.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import torch
from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache, Spans
from kvc_kernels.gpu.decode import new_schedule


@dataclasses.dataclass(frozen=True)
class Machine:
    """An H200 with four programs a processor, and two tiles of 16 KB of each on their way.

    Attributes
    ----------
    bandwidth : bytes per second of the memory. programs : that it holds.
    latency : seconds from asking for bytes to having them, on a busy memory.
    begin : seconds in which a program that begins a head reads none of its KVs: its place in the
        schedule, then the ids of its pages.
    """

    bandwidth: float = 4.8e12
    programs: int = 4 * 132
    latency: float = 1e-6
    begin: float = 1.2e-6
    under_way: int = 32 << 10


def utilisation(machine: Machine, programs: list[list[int]]) -> float:
    """Share of the bandwidth used from the first program's beginning to the last one's end.

    Parameters
    ----------
    programs : of every program, the bytes of each head or part of one that it reads.
    """
    most = machine.under_way / machine.latency
    now = served = 0.0  # seconds, and bytes that a program that always reads would have
    waiting = [(machine.begin, nth, 0) for nth, heads in enumerate(programs) if heads]
    reading: list[tuple[float, int, int]] = []
    heapq.heapify(waiting)
    while waiting or reading:
        rate = min(most, machine.bandwidth / max(1, len(reading)))
        ends = now + (reading[0][0] - served) / rate if reading else float("inf")
        if waiting and waiting[0][0] <= ends:
            then, nth, at = heapq.heappop(waiting)
            served += (then - now) * rate if reading else 0.0
            heapq.heappush(reading, (served + programs[nth][at], nth, at))
        else:
            then = ends
            served, nth, at = heapq.heappop(reading)
            if at + 1 < len(programs[nth]):
                heapq.heappush(waiting, (then + machine.begin, nth, at + 1))
        now = then
    return sum(map(sum, programs)) / machine.bandwidth / now


def by_schedule(machine: Machine, held: torch.Tensor, row_bytes: int) -> list[list[int]]:
    """What the programs read when the kernel's schedule says so.

    Parameters
    ----------
    held : int64 [B, H], KVs of every head of one layer. row_bytes : of a KV, key and value.
    """
    batch = _batch_of(held)
    schedule = new_schedule(
        batch.cache, *held.shape, torch.bfloat16, programs=machine.programs, tile=32
    )
    schedule.update(batch)
    rows, tile = held.flatten().tolist(), schedule.tile
    cuts, found = schedule.cuts.view(-1, 2).tolist(), []
    for (row, at), (to_row, to_tile) in itertools.pairwise(cuts):
        mine = []
        while row < to_row:
            mine.append(rows[row] - at * tile)
            row, at = row + 1, 0
        if to_tile > at:
            mine.append((to_tile - at) * tile)
        found.append([kvs * row_bytes for kvs in mine if kvs > 0])
    return found


def by_head(machine: Machine, held: torch.Tensor, row_bytes: int) -> list[list[int]]:
    """What programs read that are dealt whole heads in turn: the control."""
    rows = [kvs * row_bytes for kvs in held.flatten().tolist()]
    return [rows[nth :: machine.programs] for nth in range(machine.programs)]


def lengths(requests: int, heads: int, mean: int, sigma: float) -> torch.Tensor:
    """KVs of every head, int64 [B, H]: lognormal, whole pages of 16, one at least."""
    drawn = torch.randn(requests, heads, generator=torch.Generator().manual_seed(0)) * sigma
    pages = (mean / 16 * (drawn - sigma**2 / 2).exp()).round().long()
    return pages.clamp(min=1) * 16


def _batch_of(held: torch.Tensor) -> Batch:
    """A batch whose heads hold so many KVs in segments of their own, and no arena."""
    requests, heads = held.shape
    page, pages = 16, (held // 16).int()
    blocks = -(-pages.sum(1) // heads)
    spans = Spans.uncompressed(requests, heads, "cpu")
    spans.begin[:, 2] = blocks * page
    spans.first[:, 1] = pages.cumsum(1) - pages
    spans.count[:, 1] = pages
    spans.stride[:, 1] = 1
    arena = torch.empty(0, 1, heads, page, 128, dtype=torch.bfloat16)
    table = torch.zeros(requests, int(blocks.max()) * page, dtype=torch.int32)
    cache = KVCache(arena, arena, table, spans)
    return Batch(cache, torch.arange(requests), (blocks * page).long())
