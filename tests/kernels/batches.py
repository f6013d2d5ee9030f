"""Ragged batches of segment and tail, with every KV of every head also kept in a plain list."""

from __future__ import annotations

import dataclasses

import torch
from kvc_kernels.pages import Rows

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}



@dataclasses.dataclass
class Batch:
    """Requests in an arena, with every KV of every head also kept in a plain list."""

    rows: Rows
    arena_k: torch.Tensor
    arena_v: torch.Tensor
    keys: list[list[list[torch.Tensor]]]  # [request][layer][head] -> [n, D]
    values: list[list[list[torch.Tensor]]]


def build(
    segments: list[list[int] | None],
    tails: list[int],
    *,
    layers: int,
    heads: int,
    page: int,
    dim: int,
    dtype: torch.dtype,
) -> Batch:
    """Requests whose heads own ``segments[request][layer * heads + head]`` pages each."""
    torch.manual_seed(0)
    per_block = layers * heads
    begin = page  # compressed rows release their first block's positions
    blocks_of = [sum(s) // per_block if s else 0 for s in segments]
    total = 1 + sum(b + -(-t // page) for b, t in zip(blocks_of, tails, strict=True))
    arena_k = torch.randn(total, layers, heads, page, dim).to(dtype)
    arena_v = torch.randn(total, layers, heads, page, dim).to(dtype)
    context = begin + max(
        b * page + -(-t // page) * page for b, t in zip(blocks_of, tails, strict=True)
    )
    table = torch.zeros(len(segments), context, dtype=torch.int32)
    state = torch.zeros(2, len(segments), dtype=torch.int64)
    page_start = torch.zeros(len(segments), per_block + 1, dtype=torch.int64)
    free = (torch.randperm(total - 1) + 1).tolist()
    keys, values, seq_len = [], [], []
    for i, (segment, tail) in enumerate(zip(segments, tails, strict=True)):
        start = begin if segment else 0
        end = start + blocks_of[i] * page
        mine = [free.pop() for _ in range(blocks_of[i] + -(-tail // page))]
        slots = torch.tensor(mine)[:, None] * page + torch.arange(page)
        table[i, start : start + slots.numel()] = slots.flatten()
        state[0, i], state[1, i] = start, end
        if segment:
            page_start[i, 1:] = torch.tensor(segment).cumsum(0)
        seq_len.append(end + tail)
        run = [(b, p) for b in mine[: blocks_of[i]] for p in range(per_block)]
        for store, arena in ((keys, arena_k), (values, arena_v)):
            flat = arena.view(total, per_block, page, dim)
            request = []
            for layer in range(layers):
                request.append([])
                for head in range(heads):
                    index = layer * heads + head
                    first, last = page_start[i, index : index + 2].tolist()
                    parts = [flat[b, p] for b, p in run[first:last]]
                    parts += [flat[b, index] for b in mine[blocks_of[i] :]]
                    whole = torch.cat(parts) if parts else torch.empty(0, dim, dtype=dtype)
                    request[-1].append(whole[: (last - first) * page + tail])
            store.append(request)
    rows = Rows(
        table, torch.arange(len(segments)), torch.tensor(seq_len), state[0], state[1], page_start
    )
    return Batch(rows, arena_k, arena_v, keys, values)


RAGGED = {
    "uncompressed": ([None, None, None], [1, 8, 17]),
    "compressed": ([[1, 1, 3, 1, 4, 2], [2, 2, 2, 2, 2, 2]], [0, 9]),
    "mixed": ([None, [1, 5, 1, 3, 1, 1], None, [1] * 6], [7, 1, 31, 8]),
    "an idle row": ([None, None], [0, 5]),
}
