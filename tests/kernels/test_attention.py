"""The addressing rule, decode and extend in torch, over ragged batches of spans."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kvc_kernels.batch import Batch, head_pages_reference
from kvc_kernels.cache import KVCache, Spans
from kvc_kernels.decode import decode, decode_reference
from kvc_kernels.extend import extend, extend_reference
from kvc_kernels.pages import page_ids

from tests.kernels.batches import HEADS, LAYERS, RAGGED, TOLERANCE, Drawn, Row, build

BOUND = {"atol": 1e-5, "rtol": 1e-5}


def test_zeros_are_an_uncompressed_request():
    spans = Spans.uncompressed(4, 6, "cpu")
    assert {name: tuple(x.shape) for name, x in vars(spans).items()} == {
        "begin": (4, 3), "first": (4, 2, 6), "count": (4, 2, 6), "stride": (4, 2),
    }  # fmt: skip
    assert {x.dtype for x in vars(spans).values()} == {torch.int32}
    assert not any(x.any() for x in vars(spans).values())


@pytest.mark.parametrize("case", RAGGED)
def test_the_pages_of_a_head(case):
    drawn = build(RAGGED[case])
    for request, row in enumerate(drawn.batch.request.tolist()):
        for layer in range(LAYERS):
            for head in range(HEADS):
                expected = drawn.pages[request][layer][head]
                assert head_pages_reference(drawn.batch, request, layer, head) == expected
                nth = torch.arange(len(expected))
                got = page_ids(drawn.cache, row, layer * HEADS + head, nth)
                assert got.tolist() == [page for page, _, _ in expected]


def test_the_pages_of_many_heads_of_many_requests():
    """Page ids broadcast over requests, heads and pages; a negative one names some page."""
    drawn = build(RAGGED["all spans"])
    layer_head, nth = torch.arange(LAYERS * HEADS)[:, None], torch.arange(-1, 2)
    got = page_ids(drawn.cache, drawn.batch.request[:3, None, None], layer_head, nth)
    for request, by_head in enumerate(got):
        for head, (before, *pages) in enumerate(by_head.tolist()):
            expected = drawn.pages[request][head // HEADS][head % HEADS]
            assert pages == [page for page, _, _ in expected[:2]]
            assert 0 <= before < len(drawn.cache.flat_k)


@pytest.mark.parametrize("case", RAGGED)
def test_head_pages(case):
    drawn = build(RAGGED[case])
    for layer, pages in enumerate(drawn.batch.head_pages):
        expected = [
            (page, request * HEADS + head, [False] * length + [True] * (8 - length))
            for request in range(len(drawn.pages))
            for head in range(HEADS)
            for page, length, _ in drawn.pages[request][layer][head]
        ]
        columns = (pages.page, pages.owner, pages.absent)
        assert list(zip(*(x.tolist() for x in columns), strict=True)) == expected


def test_the_pages_of_no_request():
    drawn = build(RAGGED["mixed"]).choose([])
    out, lse = decode(torch.zeros(0, HEADS, 16), drawn.batch, 0, 1.0)
    assert out.shape == (0, HEADS, 16)
    assert lse.shape == (0, HEADS)


def plain_decode(query: torch.Tensor, drawn: Drawn, layer: int, scale: float) -> torch.Tensor:
    """From the plain lists: [B, H*G, D], zero without KVs."""
    out = torch.zeros(query.shape).unflatten(1, (HEADS, -1))
    grouped = query.float().unflatten(1, (HEADS, -1))
    for i, of_request in enumerate(drawn.keys):
        for head, keys in enumerate(of_request[layer]):
            weights = (grouped[i, head] @ keys.float().T * scale).softmax(-1)
            out[i, head] = weights @ drawn.values[i][layer][head].float()
    return out.flatten(1, 2)


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode(case, group, dtype):
    drawn = build(RAGGED[case], dtype=dtype)
    query = torch.randn(len(drawn.keys), HEADS * group, 16).to(dtype)
    limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for layer in range(LAYERS):
        out, lse = decode(query, drawn.batch, layer, 0.25)
        expected, expected_lse = decode_reference(query, drawn.batch, layer, 0.25)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, **limits)
        torch.testing.assert_close(lse, expected_lse, **BOUND)
        torch.testing.assert_close(expected, plain_decode(query, drawn, layer, 0.25), **BOUND)


def test_decode_of_a_head_without_kvs():
    drawn = build([Row(0), Row(0, [0, 6, 0, 0, 0, 0]), Row(3)])
    out, lse = decode(torch.randn(3, HEADS * 2, 16), drawn.batch, 0, 0.25)
    empty = torch.tensor([[True] * 6, [True, True, False, False, True, True], [False] * 6])
    assert torch.isneginf(lse).equal(empty)
    assert (out == 0).all(-1).equal(empty)


@pytest.mark.parametrize("case", RAGGED)
def test_decode_tracks_attention(case):
    """Only where asked, on top of what was there, never for KVs that are not read or shared."""
    drawn = build(RAGGED[case])
    batch, query = drawn.batch, torch.randn(len(drawn.keys), HEADS * 2, 16)
    tracked = torch.arange(len(drawn.cache.req_to_token), dtype=torch.int32) % 3
    start = torch.rand(drawn.cache.arena_k.shape[:-1])
    for layer in range(LAYERS):
        got, expected = start.clone(), start.clone()
        decode(query, batch, layer, 0.25, metric=got, tracked=tracked)
        decode_reference(query, batch, layer, 0.25, metric=expected, tracked=tracked)
        torch.testing.assert_close(got, expected, **BOUND)
        changed = (got != start).flatten(0, 2).any(-1).nonzero().flatten().tolist()
        assert changed == sorted(
            page
            for request, row in enumerate(batch.request.tolist())
            for head in drawn.pages[request][layer]
            for page, _, span in head
            if tracked[row] and span
        )


def test_other_requests_are_tracked_in_the_same_step():
    """What a step works out once is of the tensor that says who is tracked."""
    drawn = build(RAGGED["mixed"])
    query, rows = torch.randn(4, HEADS, 16), len(drawn.cache.req_to_token)
    for row in (2, 4):
        tracked = torch.arange(rows) == row
        metrics = [torch.zeros(drawn.cache.arena_k.shape[:-1]) for _ in range(2)]
        decode(query, drawn.batch, 0, 0.25, metric=metrics[0], tracked=tracked)
        decode_reference(query, drawn.batch, 0, 0.25, metric=metrics[1], tracked=tracked)
        torch.testing.assert_close(*metrics, **BOUND)


NEW = [
    ("uncompressed", [1, 3, 17]),
    ("uncompressed", [1, 8, 9]),
    ("compressed", [0, 5]),
    ("mixed", [7, 1, 30, 2]),
    ("mixed", [0, 0, 1, 8]),
    ("an idle row", [0, 5]),
    ("a shared prompt", [2, 16, 0, 1]),
    ("a shared document", [8, 0, 9]),
    ("all spans", [3, 5, 0, 1]),
    ("heads without pages", [0, 3, 0]),
]


def check_extend(got: tuple, query: torch.Tensor, drawn: Drawn, layer: int, dtype: torch.dtype):
    """Against the reference, and the reference against the plain lists."""
    expected, expected_lse = extend_reference(query, drawn.batch, layer, 0.25)
    limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    assert got[0].dtype == dtype
    torch.testing.assert_close(got[0].cpu().float(), expected, **limits)
    if got[1] is not None:
        torch.testing.assert_close(got[1].cpu(), expected_lse, **limits)
    first = 0
    for i, (_, _, new) in enumerate(drawn.batch.rows):
        for head, keys in enumerate(drawn.keys[i][layer] if new else ()):
            mine = query.unflatten(1, (HEADS, -1))[first : first + new, head].float()
            logits = torch.einsum("qgd,nd->gqn", mine, keys.float()) * 0.25
            ahead = torch.ones(new, len(keys)).triu(1 + len(keys) - new).bool()
            weights = logits.masked_fill(ahead, -torch.inf).softmax(-1)
            plain = torch.einsum("gqn,nd->qgd", weights, drawn.values[i][layer][head].float())
            of_head = expected.unflatten(1, (HEADS, -1))[first : first + new, head]
            torch.testing.assert_close(of_head, plain, **BOUND)
        first += new


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("case", "new"), NEW)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_extend(case, new, group, dtype):
    drawn = build(RAGGED[case], dtype=dtype).with_new(new)
    query = torch.randn(sum(new), HEADS * group, 16).to(dtype)
    for layer in range(LAYERS):
        got = extend(query, drawn.batch, layer, 0.25)
        assert got[1] is not None, "torch has it on a CPU"
        check_extend(got, query, drawn, layer, dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_cache_in_eight_bits(dtype):
    drawn = build(RAGGED["all spans"], dtype=torch.float16).to(dtype).with_new([3, 5, 0, 1])
    query = torch.randn(9, HEADS * 2, 16).half()
    check_extend(extend(query, drawn.batch, 1, 0.25), query, drawn, 1, torch.float16)
    out, _ = decode(query[:4], drawn.batch, 1, 0.25)
    expected = plain_decode(query[:4], drawn, 1, 0.25)
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=2e-3)


def test_what_does_not_fit_is_refused():
    drawn = build(RAGGED["mixed"]).with_new([1, 1, 1, 1])
    for query in (torch.zeros(4, 4, 16), torch.zeros(4, 6, 8), torch.zeros(4, 16, 6).mT):
        with pytest.raises(ValueError, match="does not fit"):
            decode(query, drawn.batch, 0, 1.0)
        with pytest.raises(ValueError, match="does not fit"):
            extend(query, drawn.batch, 0, 1.0)
    cache, spans = drawn.cache, drawn.cache.spans
    tables = (cache.arena_k, cache.arena_v, cache.req_to_token)
    with pytest.raises(ValueError, match="differ"):
        KVCache(cache.arena_k, cache.arena_v[1:], cache.req_to_token, spans)
    with pytest.raises(ValueError, match="arena_k is not contiguous"):
        KVCache(cache.arena_k.mT.contiguous().mT, *tables[1:], spans)
    with pytest.raises(ValueError, match=r"count is torch\.int64"):
        KVCache(*tables, dataclasses.replace(spans, count=spans.count.long()))
    with pytest.raises(ValueError, match=r"begin is torch\.int32 \[4, 3\], not int32 \[5, 3\]"):
        KVCache(*tables, dataclasses.replace(spans, begin=spans.begin[1:]))
    with pytest.raises(ValueError, match="first is not contiguous"):
        KVCache(*tables, dataclasses.replace(spans, first=spans.first.mT.contiguous().mT))
    with pytest.raises(ValueError, match="3 lengths for 4 requests"):
        Batch(cache, drawn.batch.request, drawn.batch.seq_len[1:])
