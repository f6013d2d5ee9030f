"""Decode and extend against their references, over ragged batches of segment and tail."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kvc_kernels.decode import decode, decode_reference
from kvc_kernels.extend import extend, extend_compressed, extend_reference
from kvc_kernels.pages import Rows, head_pages

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


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode(case, group, dtype):
    segments, tails = RAGGED[case]
    layers, heads, page, dim = 2, 3, 8, 16
    batch = build(segments, tails, layers=layers, heads=heads, page=page, dim=dim, dtype=dtype)
    query = torch.randn(len(tails), heads * group, dim).to(dtype)
    flat_k, flat_v = batch.arena_k.view(-1, page, dim), batch.arena_v.view(-1, page, dim)
    by_layer = head_pages(batch.rows, layers, heads, page)
    for layer in range(layers):
        pages = by_layer[layer]
        out, lse = decode(query, flat_k, flat_v, pages, dim**-0.5)
        expected, expected_lse = decode_reference(query, flat_k, flat_v, pages, dim**-0.5)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
        for i in range(len(tails)):
            for head in range(heads):
                mine = query[i, head * group : (head + 1) * group].float()
                keys, values = batch.keys[i][layer][head], batch.values[i][layer][head]
                if not len(keys):
                    assert torch.isinf(lse[i, head * group])
                    continue
                direct = (mine @ keys.float().T * dim**-0.5).softmax(-1) @ values.float()
                got = out[i, head * group : (head + 1) * group]
                torch.testing.assert_close(
                    got, direct, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
                )


@pytest.mark.parametrize("case", RAGGED)
def test_decode_counts_squared_attention(case):
    """Only where asked, on top of what was there, and never for KVs that are not read."""
    segments, tails = RAGGED[case]
    layers, heads, group, page, dim = 2, 3, 2, 8, 16
    batch = build(
        segments, tails, layers=layers, heads=heads, page=page, dim=dim, dtype=torch.float32
    )
    query = torch.randn(len(tails), heads * group, dim)
    flat_k, flat_v = batch.arena_k.view(-1, page, dim), batch.arena_v.view(-1, page, dim)
    counted = (torch.arange(len(tails)) % 2 == 1).repeat_interleave(heads)
    start = torch.rand(flat_k.shape[:2])
    for pages in head_pages(batch.rows, layers, heads, page):
        got, expected = start.clone(), start.clone()
        decode(query, flat_k, flat_v, pages, dim**-0.5, got, counted)
        decode_reference(query, flat_k, flat_v, pages, dim**-0.5, expected, counted)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert (got != start).any() == bool(pages.count[counted].sum())
        others = pages.page[~counted[pages.owner]]
        assert torch.equal(got[others], start[others])


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("prefix", "new"), [(0, 1), (0, 9), (5, 1), (16, 7)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_extend(group, prefix, new, dtype):
    torch.manual_seed(0)
    query = torch.randn(new, 2 * group, 16).to(dtype)
    keys, values = torch.randn(2, prefix + new, 2, 16).to(dtype)
    out = extend(query, keys, values, 0.25)
    expected = extend_reference(query, keys, values, 0.25)
    torch.testing.assert_close(
        out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_extend_over_a_compressed_prefix():
    """Every head sees its own segment, then the tail causally."""
    torch.manual_seed(0)
    new, heads, group, dim = 5, 2, 3, 16
    query = torch.randn(new, heads * group, dim)
    segment_k = [torch.randn(n, dim) for n in (8, 24)]
    segment_v = [torch.randn(n, dim) for n in (8, 24)]
    tail_k, tail_v = torch.randn(2, 3 + new, heads, dim)
    out = extend_compressed(query, segment_k, segment_v, tail_k, tail_v, 0.25)
    for head in range(heads):
        keys = torch.cat([segment_k[head], tail_k[:, head]])[:, None]
        values = torch.cat([segment_v[head], tail_v[:, head]])[:, None]
        mine = slice(head * group, (head + 1) * group)
        expected = extend_reference(query[:, mine], keys, values, 0.25)
        torch.testing.assert_close(out[:, mine], expected, atol=1e-5, rtol=1e-5)
