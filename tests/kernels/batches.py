"""Ragged batches of spans, with every KV of every head also kept in a plain list."""

from __future__ import annotations

import dataclasses

import torch
from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache, Spans

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LAYERS, HEADS = 2, 3


@dataclasses.dataclass(frozen=True)
class Row:
    """What one request holds.

    Attributes
    ----------
    tail : KVs in the tail.
    own : pages of every head in a segment of its own.
    shared : the same of a segment that others read too; a number is of canonical blocks.
    """

    tail: int
    own: list[int] | None = None
    shared: list[int] | int = 0


@dataclasses.dataclass
class Drawn:
    """A batch, and every KV of every head in a plain list.

    Attributes
    ----------
    keys, values : ``[request][layer][head]`` -> [n, D].
    pages : likewise, what each head reads: (page id, KVs in it, span).
    """

    batch: Batch
    keys: list[list[list[torch.Tensor]]]
    values: list[list[list[torch.Tensor]]]
    pages: list[list[list[list[tuple[int, int, int]]]]]

    @property
    def cache(self) -> KVCache:
        return self.batch.cache

    def on(self, device: str) -> Batch:
        """The batch with its tensors on `device`, or itself."""
        cache, spans = self.cache, self.cache.spans
        moved = Spans(*(x.to(device) for x in vars(spans).values()))
        arenas = (x.to(device) for x in (cache.arena_k, cache.arena_v, cache.req_to_token))
        return Batch(
            KVCache(*arenas, moved),
            self.batch.request.to(device),
            self.batch.seq_len.to(device),
            self.batch.new,
            self.batch.rows,
        )

    def choose(self, order: list[int]) -> Drawn:
        """Some of the requests, in this order."""
        batch = dataclasses.replace(
            self.batch, request=self.batch.request[order], seq_len=self.batch.seq_len[order]
        )
        lists = ([each[i] for i in order] for each in (self.keys, self.values, self.pages))
        return Drawn(batch, *lists)

    def with_new(self, new: list[int]) -> Drawn:
        """As a prefill, in which the last `new` KVs of every request are new."""
        requests = zip(self.batch.request.tolist(), self.batch.seq_len.tolist(), new, strict=True)
        batch = dataclasses.replace(
            self.batch,
            new=new,
            rows=[(row, length - count, count) for row, length, count in requests],
        )
        return Drawn(batch, self.keys, self.values, self.pages)

    def fresh(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a prefill's new tokens in one layer: [t, H, D] and [t, H, Dv]."""
        assert self.batch.new is not None
        return tuple(
            torch.cat([
                torch.stack([head[len(head) - new :] for head in request[layer]], 1)
                for request, new in zip(lists, self.batch.new, strict=True)
            ])
            for lists in (self.keys, self.values)
        )  # fmt: skip

    def to(self, dtype: torch.dtype) -> Drawn:
        """The same with a cache of `dtype`; the plain lists hold the rounded numbers."""
        cache = self.cache
        rounded = KVCache(
            cache.arena_k.to(dtype), cache.arena_v.to(dtype), cache.req_to_token, cache.spans
        )
        lists = (
            [[[head.to(dtype).to(head.dtype) for head in layer] for layer in row] for row in each]
            for each in (self.keys, self.values)
        )
        return Drawn(dataclasses.replace(self.batch, cache=rounded), *lists, self.pages)


def build(
    rows: list[Row],
    *,
    page: int = 8,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    layers: int = LAYERS,
    heads: int = HEADS,
    served: bool = False,
) -> Drawn:
    """Requests in an arena whose blocks are in no order; row 0 of the tables is nobody's.

    Blocks that no span needs in full have pages that are nobody's. If it is as `served`, no
    head holds more KVs than there were tokens.
    """
    torch.manual_seed(0)
    per_block = layers * heads
    spans = Spans.uncompressed(len(rows) + 1, per_block, "cpu")
    of_row = []  # positions from which blocks are, and how many, of each span
    for row in rows:
        shared, own = _blocks(row.shared, per_block), _blocks(row.own, per_block)
        # Whoever owns a packed segment has released the positions before it.
        at = page if isinstance(row.shared, list) else 0
        released = page if own else 0
        if served:
            at *= max(1, max(row.shared) - shared) if at else 1
            released *= max(1, max(row.own) - own) if own else 1
        begins = [at, at := at + shared * page + released, at + own * page]
        of_row.append(list(zip(begins, (shared, own, -(-row.tail // page)), strict=True)))
    total = 1 + sum(count for each in of_row for _, count in each)
    context = 1 + max(begin + count * page for each in of_row for begin, count in each)
    arenas = [torch.randn(total, layers, heads, page, dim).to(dtype) for _ in "kv"]
    table = torch.zeros(len(rows) + 1, context, dtype=torch.int32)
    free = (torch.randperm(total - 1) + 1).tolist()
    pages = []
    for number, (row, ranges) in enumerate(zip(rows, of_row, strict=True), start=1):
        spans.begin[number] = torch.tensor([begin for begin, _ in ranges])
        runs = []  # of every span the pages of its run
        for begin, count in ranges:
            mine = [free.pop() for _ in range(count)]
            slots = torch.tensor(mine)[:, None] * page + torch.arange(page)
            table[number, begin : begin + count * page] = slots.flatten()
            runs.append([block * per_block + index for block in mine for index in range(per_block)])
        held = [[] for _ in range(per_block)]
        for span, given in enumerate((row.shared, row.own)):
            packed, first = isinstance(given, list), 0
            spans.stride[number, span] = 1 if packed else per_block if given else 0
            for head in range(per_block if given else 0):
                chosen = runs[span][first : first + given[head]] if packed else None
                chosen = runs[span][head::per_block] if chosen is None else chosen
                spans.first[number, span, head] = first if packed else head
                spans.count[number, span, head] = len(chosen)
                held[head] += [(one, page, span) for one in chosen]
                first += len(chosen)
        for head, mine in enumerate(held):
            lengths = [min(page, row.tail - at) for at in range(0, row.tail, page)]
            tail = zip(runs[2][head::per_block], lengths, strict=True)
            mine += [(one, length, 2) for one, length in tail]
        pages.append([held[layer * heads : (layer + 1) * heads] for layer in range(layers)])
    lists = [_kvs(arena.flatten(0, 2), pages) for arena in arenas]
    tails = torch.tensor([row.tail for row in rows])
    batch = Batch(
        KVCache(*arenas, table, spans),
        torch.arange(1, len(rows) + 1),
        spans.begin[1:, 2] + tails,
    )
    return Drawn(batch, *lists, pages)


def _blocks(pages: list[int] | int | None, per_block: int) -> int:
    return -(-sum(pages) // per_block) if isinstance(pages, list) else pages or 0


def _kvs(flat: torch.Tensor, pages: list) -> list:
    """The KVs on every head's pages."""
    nothing = flat[0, :0]
    return [
        [
            [torch.cat([nothing, *(flat[page, :n] for page, n, _ in head)]) for head in layer]
            for layer in request
        ]
        for request in pages
    ]


#: For LAYERS * HEADS = 6 heads.
RAGGED = {
    "uncompressed": [Row(1), Row(8), Row(17)],
    "compressed": [Row(0, [1, 1, 3, 1, 4, 2]), Row(9, [2] * 6)],
    "mixed": [Row(7), Row(1, [1, 5, 1, 3, 1, 1]), Row(31), Row(8, [1] * 6)],
    "an idle row": [Row(0), Row(5)],
    "a shared prompt": [Row(3, shared=2), Row(16, shared=1), Row(0, shared=3), Row(2)],
    "a shared document": [Row(8, shared=[1, 4, 1, 2, 3, 1]), Row(0, shared=[1] * 6), Row(9)],
    "all spans": [
        Row(3, [2, 1, 1, 5, 2, 1], 1),
        Row(8, [1, 1, 3, 1, 4, 2], [3, 1, 1, 1, 1, 5]),
        Row(0, [1] * 6, 2),
        Row(1),
    ],
    "heads without pages": [
        Row(0, [0, 2, 0, 3, 0, 1], [1, 0, 0, 2, 0, 2]),
        Row(4, [6, 0, 0, 0, 0, 0], 1),
        Row(0),
    ],
}
