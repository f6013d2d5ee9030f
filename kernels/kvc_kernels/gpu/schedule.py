"""Which program of a decode step reads which KVs: equal stretches of one line of work a layer.

The heads of all requests of a layer are a line, each as long as its tiles of KVs and ROW_COST for
beginning it. Programs that stay on the GPU together cut the line into equal stretches, whatever
the lengths are (Stream-K, arXiv 2301.03598; FlashInfer, arXiv 2501.01005, section 3.3). One
small kernel a step makes the cuts of all layers. What it writes is also a snapshot: the step reads
nothing of spans, rows or lengths but this, and may be replayed while they change for the next.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache
from kvc_kernels.gpu.layout import head_place, head_spans, held_kvs, quotient, tables

#: What beginning a head costs, in tiles: its query, its pages and a wait for its first KVs.
ROW_COST = 1
#: Tiles and beginnings that a stretch has at least: what is cut has to be merged.
LEAST = 4
#: Rows of the line, cuts or blocks of a request that a program takes at a time.
AT_ONCE = 1024


@triton.jit
def _blocks(
    req_to_token, request, seq_len, blocks, nth, context, width,
    P: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The blocks of one request's row, as far as it has tokens."""
    row = tl.load(request + nth).to(tl.int64)
    used = tl.minimum(tl.cdiv(tl.load(seq_len + nth).to(tl.int32), P), width)
    for low in range(0, used, AT_ONCE):
        block = low + tl.arange(0, AT_ONCE)
        slot = tl.load(req_to_token + row * context + block * P, mask=block < used, other=0)
        tl.store(blocks + nth.to(tl.int64) * width + block, slot // P, mask=block < used)


@triton.jit
def _rows(
    begin, first, count, stride, request, seq_len, heads, starts, layer, rows, width,
    HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    COST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Where every head of a layer has its KVs, and where it begins in the line; the line's end."""
    total = 0
    for low in range(0, rows, AT_ONCE):
        nth = low + tl.arange(0, AT_ONCE)
        mine = nth < rows
        nth = tl.minimum(nth, rows - 1)
        row = tl.load(request + nth // HEADS).to(tl.int64)
        length = tl.load(seq_len + nth // HEADS).to(tl.int32)
        spans = head_spans(
            begin, first, count, stride, row, layer * HEADS + nth % HEADS, PER_BLOCK, P
        )
        held = tl.where(_sound(spans, length, width, PER_BLOCK, P), held_kvs(spans, length, P), 0)
        shared, packed, places, strides, _ = spans
        at = heads + (layer * rows + nth).to(tl.int64) * 8
        tl.store(at, held, mask=mine)
        tl.store(at + 1, shared, mask=mine)
        tl.store(at + 2, packed, mask=mine)
        for i in tl.static_range(3):
            tl.store(at + 3 + i, places[i], mask=mine)
        for i in tl.static_range(2):
            tl.store(at + 6 + i, strides[i], mask=mine)
        cost = tl.where(mine, tl.cdiv(held, TILE) + COST, 0)
        through = total + tl.cumsum(cost, 0)
        tl.store(starts + layer * (rows + 1) + nth, through - cost, mask=mine)
        total += tl.sum(cost, 0)
    tl.store(starts + layer * (rows + 1) + rows, total)
    return total


@triton.jit
def _sound(spans, length, width, PER_BLOCK: tl.constexpr, P: tl.constexpr):
    """Whether all pages lie in the row's blocks that hold `length` tokens.

    A row that has been cleared or given to another request may contradict itself. Nobody wants
    its result; it is nothing, and nothing outside the row is read for it.
    """
    shared, packed, places, strides, tail = spans
    sound = (length >= 0) & (length <= width * P) & (shared >= 0) & (packed >= shared) & (tail >= 0)
    low, high = tl.minimum(places[0], places[1] + shared * strides[1]), 0
    low = tl.where(packed > 0, low, 0)
    high = tl.where(shared > 0, places[0] + (shared - 1) * strides[0], 0)
    high = tl.maximum(high, tl.where(packed > shared, places[1] + (packed - 1) * strides[1], 0))
    sound &= (low >= 0) & (strides[0] >= 0) & (strides[1] >= 0)
    return sound & ((packed == 0) | (high < tl.cdiv(length, P) * PER_BLOCK))


@triton.jit
def stretches_of(total, programs, LEAST: tl.constexpr):
    """How many stretches a line of `total` is cut into."""
    return tl.minimum(tl.maximum(total // LEAST, 1), programs)


@triton.jit
def cut_line(
    starts, cuts, layer, rows, total, programs,
    COST: tl.constexpr, LEAST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Cut a layer's line into equal stretches: of every cut the row, and the tile in it."""
    line = starts + layer * (rows + 1)
    stretches = stretches_of(total, programs, LEAST)
    for low in range(0, programs + 1, AT_ONCE):
        nth = low + tl.arange(0, AT_ONCE)
        wanted = tl.minimum(nth, stretches).to(tl.int64) * total // stretches
        left = tl.zeros([AT_ONCE], tl.int32)  # the last row that begins at `wanted` or before
        right = left + rows
        span = rows
        while span > 0:
            middle = (left + right + 1) // 2
            before = tl.load(line + middle) <= wanted
            left = tl.where(before, middle, left)
            right = tl.where(before, right, tl.maximum(middle - 1, left))
            span = span // 2
        tile = tl.maximum(wanted.to(tl.int32) - tl.load(line + left) - COST, 0)
        at = cuts + (layer * (programs + 1) + nth) * 2
        tl.store(at, left, mask=nth <= programs)
        tl.store(at + 1, tile, mask=nth <= programs)


@triton.jit(do_not_specialize=["rows", "width", "programs"])
def _schedule(
    req_to_token, begin, first, count, stride, request, seq_len,
    heads, blocks, starts, cuts,
    rows, context, width, programs,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, P: tl.constexpr,
    TILE: tl.constexpr, COST: tl.constexpr, LEAST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program a layer, and one a request."""
    pid = tl.program_id(0)
    if pid < LAYERS:
        total = _rows(
            begin, first, count, stride, request, seq_len, heads, starts, pid, rows, width,
            HEADS, PER_BLOCK, P, TILE, COST, AT_ONCE,
        )  # fmt: skip
        tl.debug_barrier()  # other threads read what these have written
        cut_line(starts, cuts, pid, rows, total, programs, COST, LEAST, AT_ONCE)
    else:
        _blocks(
            req_to_token, request, seq_len, blocks, pid - LAYERS, context, width, P, AT_ONCE
        )  # fmt: skip


@triton.jit
def read_row(heads, nth):
    """KVs of the nth row of all layers' (`layer * R + row`), and its spans for `head_place`."""
    at = heads + nth.to(tl.int64) * 8
    places = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    strides = tl.load(at + 6), tl.load(at + 7)
    return tl.load(at), (tl.load(at + 1), tl.load(at + 2), places, strides, 0)


@triton.jit
def tile_kvs(
    blocks, spans, held, nth, PER_BLOCK: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr
):
    """The nth tile of a head: where its KVs are in the flat view [num_blocks * L * H * P, D].

    Page ids are worked out once a page. KVs are in an order in which one thread copies those of few
    pages: the first of every page, then the second. Behind the head's end its last page is named.

    Parameters
    ----------
    blocks : pointer to those of its request. held, spans : from `read_row`; not empty.

    Returns
    -------
    place : int64 [TILE]. token : int32 [TILE], the head's KVs counted from 0.
    """
    if P <= TILE:
        page = nth * (TILE // P) + tl.arange(0, TILE // P)
        within = tl.arange(0, P)
    else:
        at = nth * TILE + tl.arange(0, 1)
        page = quotient(at, P)
        within = at - page * P + tl.arange(0, TILE)
    place = head_place(tl.minimum(page, quotient(held - 1, P)), spans, PER_BLOCK)
    in_row = quotient(place, PER_BLOCK)
    found = (tl.load(blocks + in_row) - in_row) * PER_BLOCK + place
    token = page[None, :] * P + within[:, None]
    where = found.to(tl.int64)[None, :] * P + within[:, None]
    return tl.reshape(where, [TILE]), tl.reshape(token, [TILE])


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """What the programs of a decode step do, for `requests` requests or fewer.

    Its tensors stay where they are: a CUDA graph may hold them, for batches of any size that fits.
    ``R = B * H`` rows, B requests of the batch at hand.

    Attributes
    ----------
    heads : int32 [L * R * 8], of every row in every layer its KVs, and its spans as `head_spans`
        has them: shared, packed, three places and two strides.
    blocks : int32 [B * width], the blocks of the request's row.
    starts : int32 [L * (R + 1)], where rows begin in the line, in tiles and beginnings; its end.
    cuts : int32 [L * (programs + 1) * 2], of every stretch's beginning the row and the tile in it.
    programs : that share a layer.
    tile : KVs of a tile.
    """

    heads: torch.Tensor
    blocks: torch.Tensor
    starts: torch.Tensor
    cuts: torch.Tensor
    programs: int
    tile: int

    @classmethod
    def allocate(cls, cache: KVCache, requests: int, programs: int, tile: int) -> Schedule:
        """Room for `requests` requests of `cache`."""
        sizes = schedule_sizes(cache.layers, cache.heads, requests, width(cache), programs)
        heads, blocks, starts, cuts = (
            torch.empty(size, dtype=torch.int32, device=cache.arena_k.device) for size in sizes
        )
        return cls(heads, blocks, starts, cuts, programs, tile)

    def update(self, batch: Batch) -> None:
        """Make the schedule of `batch`, in all layers: `decode` of this batch goes by it.

        Waits for nothing and reads only device memory, so it can be captured in a CUDA graph.
        """
        batch.__dict__["_schedule"] = self
        cache, requests = batch.cache, len(batch.request)
        if len(self.blocks) < requests * width(cache):
            raise ValueError(f"a schedule of {len(self.blocks) // width(cache)} requests")
        if not requests:
            return
        rows = requests * cache.heads
        _schedule[(cache.layers + requests,)](
            *tables(batch), self.heads, self.blocks, self.starts, self.cuts,
            rows, cache.req_to_token.shape[1], width(cache), self.programs,
            LAYERS=cache.layers, HEADS=cache.heads, PER_BLOCK=cache.layers * cache.heads,
            P=cache.page_size, TILE=self.tile, COST=ROW_COST, LEAST=LEAST, AT_ONCE=AT_ONCE,
            num_warps=8,
        )  # fmt: skip


def schedule_sizes(
    layers: int, heads: int, requests: int, width: int, programs: int
) -> tuple[int, int, int, int]:
    """Numbers of int32 in a schedule's heads, blocks, starts and cuts; `width` blocks a row."""
    rows = requests * heads
    return layers * rows * 8, requests * width, layers * (rows + 1), layers * (programs + 1) * 2


def schedule_of(batch: Batch) -> Schedule | None:
    """What was made for the batch, if anything was."""
    return batch.__dict__.get("_schedule")


def width(cache: KVCache) -> int:
    """Blocks of a request's row."""
    return -(-cache.req_to_token.shape[1] // cache.page_size)
