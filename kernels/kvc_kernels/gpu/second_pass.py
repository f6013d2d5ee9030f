"""Which program of a step's second pass reads which KVs: those of tracked requests, cut equally.

The heads of tracked requests alone are a line of their own, as in `schedule.py`, but for their
shared spans, which nothing is added to. So one request among a thousand is shared by all programs,
and where none is tracked no program has anything to do.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache
from kvc_kernels.gpu.schedule import AT_ONCE, LEAST, ROW_COST, Schedule, cut_line


@triton.jit
def first_own_tile(shared, P: tl.constexpr, TILE: tl.constexpr):
    """The first tile of a head that has KVs behind its `shared` pages; a torn row has any."""
    return tl.maximum(shared * P // TILE, 0)


@triton.jit(do_not_specialize=["requests", "programs"])
def _second_pass(
    tracked, request, heads, members, starts, cuts, requests, programs,
    HEADS: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    COST: tl.constexpr, LEAST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program a layer; all write the same `members`."""
    layer, chosen = tl.program_id(0), 0
    for low in range(0, requests, AT_ONCE):
        nth = low + tl.arange(0, AT_ONCE)
        row = tl.load(request + nth, mask=nth < requests, other=0).to(tl.int64)
        power = tl.load(tracked + row, mask=nth < requests, other=0)
        mine = (power > 0).to(tl.int32)
        at = members + (chosen + tl.cumsum(mine, 0) - 1) * 2
        tl.store(at, nth, mask=mine > 0)
        tl.store(at + 1, power, mask=mine > 0)
        chosen += tl.sum(mine, 0)
    tl.debug_barrier()  # other threads read what these have written
    rows, total = chosen * HEADS, 0
    line = starts + layer * (rows + 1)
    for low in range(0, rows, AT_ONCE):
        nth = low + tl.arange(0, AT_ONCE)
        mine = nth < rows
        batch = tl.load(members + nth // HEADS * 2, mask=mine, other=0)
        row = (layer * requests + batch) * HEADS + nth % HEADS
        held = tl.load(heads + row.to(tl.int64) * 8, mask=mine, other=0)
        shared = tl.load(heads + row.to(tl.int64) * 8 + 1, mask=mine, other=0)
        tiles = tl.maximum(tl.cdiv(held, TILE) - first_own_tile(shared, P, TILE), 0)
        cost = tl.where(mine, tiles + COST, 0)
        through = total + tl.cumsum(cost, 0)
        tl.store(line + nth, through - cost, mask=mine)
        total += tl.sum(cost, 0)
    tl.store(line + rows, total)
    tl.debug_barrier()
    cut_line(starts, cuts, layer, rows, total, programs, COST, LEAST, AT_ONCE)


@dataclasses.dataclass(frozen=True, eq=False)
class SecondPass:
    """What the programs of a second pass do, for `requests` requests or fewer; cf. `Schedule`.

    Attributes
    ----------
    members : int32 [B * 2], of every tracked request its number in the batch and its power.
    starts : int32 [L * (R + 1)], where the heads of tracked requests begin in the line; its end.
    cuts : int32 [L * (programs + 1) * 2], of every stretch's beginning the head (counted over
        tracked requests) and the tile, counted behind its shared span.
    programs : that share a layer.
    """

    members: torch.Tensor
    starts: torch.Tensor
    cuts: torch.Tensor
    programs: int

    @classmethod
    def allocate(cls, cache: KVCache, requests: int, programs: int) -> SecondPass:
        """Room for `requests` requests of `cache`."""
        sizes = second_pass_sizes(cache.layers, cache.heads, requests, programs)
        device = cache.arena_k.device
        members, starts, cuts = (
            torch.empty(size, dtype=torch.int32, device=device) for size in sizes
        )
        return cls(members, starts, cuts, programs)

    def update(self, batch: Batch, schedule: Schedule, tracked: torch.Tensor) -> None:
        """Make the second pass of `batch`, in all layers, from its `schedule`.

        Waits for nothing. `tracked` is read here and not by the step itself.

        Parameters
        ----------
        tracked : int32 [rows], as `kvc_kernels.decode.decode` has it.
        """
        batch.__dict__["_second_pass"] = self
        cache, requests = batch.cache, len(batch.request)
        if len(self.members) < requests * 2:
            raise ValueError(f"a second pass of {len(self.members) // 2} requests")
        _second_pass[(cache.layers,)](
            tracked, batch.request, schedule.heads, self.members, self.starts, self.cuts,
            requests, self.programs,
            HEADS=cache.heads, P=cache.page_size, TILE=schedule.tile,
            COST=ROW_COST, LEAST=LEAST, AT_ONCE=AT_ONCE, num_warps=8,
        )  # fmt: skip


def second_pass_sizes(
    layers: int, heads: int, requests: int, programs: int
) -> tuple[int, int, int]:
    """Numbers of int32 in a second pass's members, starts and cuts."""
    return requests * 2, layers * (requests * heads + 1), layers * (programs + 1) * 2


def second_pass_of(batch: Batch) -> SecondPass | None:
    """What was made for the batch, if anything was."""
    return batch.__dict__.get("_second_pass")
