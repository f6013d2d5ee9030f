"""Decode and extend against their references, over ragged batches of segment and tail."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.decode import decode, decode_reference
from kvc_kernels.extend import extend, extend_compressed, extend_reference
from kvc_kernels.pages import head_pages

from tests.kernels.batches import RAGGED, TOLERANCE, build


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
