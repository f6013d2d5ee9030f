"""Decode and extend in Triton against the float32 references, over segment and tail."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.decode import decode_reference
from kvc_kernels.extend import extend_reference
from kvc_kernels.gpu.decode import decode
from kvc_kernels.gpu.extend import extend
from kvc_kernels.gpu.layout import Cache
from kvc_kernels.pages import Rows, head_pages

from tests.kernels.batches import RAGGED, TOLERANCE, Batch, build

LAYERS, HEADS = 2, 3


def cached(batch: Batch, device: str) -> Cache:
    rows = batch.rows
    tables = (rows.req_to_token, rows.segment_begin, rows.tail_begin, rows.page_start)
    return Cache(*(x.to(device) for x in (batch.arena_k, batch.arena_v, *tables)))


def drawn(case: str, page: int = 8, dim: int = 16, dtype: torch.dtype = torch.float32) -> Batch:
    segments, tails = RAGGED[case]
    return build(
        segments, tails, layers=LAYERS, heads=HEADS, page=page, dim=dim, dtype=dtype
    )


def expected_decode(query: torch.Tensor, batch: Batch, layer: int, scale: float, **metric):
    """The reference, over the pages of one layer."""
    page, dim = batch.arena_k.shape[-2:]
    flat = (arena.view(-1, page, dim) for arena in (batch.arena_k, batch.arena_v))
    pages = head_pages(batch.rows, LAYERS, HEADS, page)[layer]
    return decode_reference(query, *flat, pages, scale, **metric)


def check_decode(batch: Batch, group: int, dtype: torch.dtype, device: str, splits: int):
    dim = batch.arena_k.shape[-1]
    torch.manual_seed(1)
    query = torch.randn(len(batch.rows.request), HEADS * group, dim).to(dtype)
    for layer in range(LAYERS):
        out, lse = decode(
            query.to(device), cached(batch, device), layer, batch.rows.request.to(device),
            batch.rows.seq_len.to(device), dim**-0.5, splits=splits,
        )  # fmt: skip
        expected, expected_lse = expected_decode(query, batch, layer, dim**-0.5)
        assert out.dtype == dtype
        limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(out.cpu().float(), expected, **limits)
        torch.testing.assert_close(lse.cpu(), expected_lse, **limits)


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode(case, splits, dtype, device):
    check_decode(drawn(case, dtype=dtype), 4, dtype, device, splits)


@pytest.mark.parametrize("group", [1, 2, 5, 16])
def test_decode_of_query_groups(group, device):
    check_decode(drawn("mixed"), group, torch.float32, device, 2)


@pytest.mark.parametrize(
    ("page", "dim"), [(8, 64), (16, 96), (32, 128), (64, 256), (16, 24)], ids=str
)
def test_decode_of_other_shapes(page, dim, device):
    check_decode(drawn("mixed", page, dim, torch.float16), 2, torch.float16, device, 2)


@pytest.mark.parametrize("tail", [0, 1, 7, 8, 9])
def test_decode_at_the_edges_of_a_page(tail, device):
    batch = build(
        [None, [1] * 6], [tail, tail], layers=LAYERS, heads=HEADS, page=8, dim=16,
        dtype=torch.float32,
    )  # fmt: skip
    check_decode(batch, 2, torch.float32, device, 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_decode_of_a_cache_in_eight_bits(dtype, device):
    batch = drawn("mixed", dtype=torch.float16)
    for name in ("arena_k", "arena_v"):
        setattr(batch, name, getattr(batch, name).to(dtype))
    torch.manual_seed(1)
    query = torch.randn(len(batch.rows.request), HEADS * 2, 16).half()
    out, _ = decode(
        query.to(device), cached(batch, device), 1, batch.rows.request.to(device),
        batch.rows.seq_len.to(device), 0.25, splits=2,
    )  # fmt: skip
    for name in ("arena_k", "arena_v"):
        setattr(batch, name, getattr(batch, name).float())
    expected, _ = expected_decode(query, batch, 1, 0.25)
    torch.testing.assert_close(out.cpu().float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("splits", [1, 2])
def test_the_metric_of_counted_requests(splits, device):
    batch = drawn("mixed")
    query = torch.randn(len(batch.rows.request), HEADS * 2, 16)
    counted = torch.tensor([True, True, False, True])
    metric = torch.rand(batch.arena_k.shape[:-1])
    expected = metric.clone()
    expected_decode(
        query, batch, 1, 0.25, metric=expected.flatten(0, 2),
        counted=counted.repeat_interleave(HEADS),
    )  # fmt: skip
    got = metric.to(device)
    decode(
        query.to(device), cached(batch, device), 1, batch.rows.request.to(device),
        batch.rows.seq_len.to(device), 0.25, splits=splits, metric=got, counted=counted.to(device),
    )  # fmt: skip
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(expected, metric)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_extend_over_a_cache_in_eight_bits(dtype, device):
    batch = drawn("mixed", dtype=torch.float16)
    for name in ("arena_k", "arena_v"):
        setattr(batch, name, getattr(batch, name).to(dtype))
    for held in (batch.keys, batch.values):
        for row in held:
            row[:] = [[head.to(dtype).half() for head in layer] for layer in row]
    check_extend(batch, [7, 1, 30, 2], 2, torch.float16, device)


def check_extend(batch: Batch, new: list[int], group: int, dtype: torch.dtype, device: str):
    """The last `new` tokens of every request are asked about; every head has its own prefix."""
    dim = batch.arena_k.shape[-1]
    torch.manual_seed(2)
    start = torch.tensor([0, *new]).cumsum(0)
    query = torch.randn(int(start[-1]), HEADS * group, dim).to(dtype)
    for layer in range(LAYERS):
        out, lse = extend(
            query.to(device), cached(batch, device), layer, batch.rows.request.to(device),
            batch.rows.seq_len.to(device), start.to(device), max(new), dim**-0.5,
        )  # fmt: skip
        assert out.dtype == dtype
        for i, (first, last) in enumerate(zip(start.tolist(), start.tolist()[1:], strict=False)):
            for head in range(HEADS):
                lanes = slice(head * group, (head + 1) * group)
                keys = batch.keys[i][layer][head][:, None].float()
                values = batch.values[i][layer][head][:, None].float()
                mine = query[first:last, lanes]
                expected = extend_reference(mine, keys, values, dim**-0.5)
                limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
                torch.testing.assert_close(out[first:last, lanes].cpu().float(), expected, **limits)
                for token in range(last - first):
                    seen = keys[: len(keys) - (last - first) + token + 1, 0]
                    sums = (mine[token].float() @ seen.T * dim**-0.5).logsumexp(-1)
                    torch.testing.assert_close(lse[first + token, lanes].cpu(), sums, **limits)


@pytest.mark.parametrize(
    ("case", "new"),
    [
        ("uncompressed", [1, 3, 17]),
        ("uncompressed", [1, 8, 9]),
        ("compressed", [0, 5]),
        ("mixed", [7, 1, 30, 2]),
        ("mixed", [0, 0, 1, 8]),
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_extend(case, new, dtype, device):
    check_extend(drawn(case, dtype=dtype), new, 4, dtype, device)


@pytest.mark.parametrize("group", [1, 3, 16])
def test_extend_of_query_groups(group, device):
    check_extend(drawn("mixed"), [7, 1, 30, 2], group, torch.float32, device)


@pytest.mark.parametrize(("page", "dim"), [(32, 64), (16, 96), (8, 256)], ids=str)
def test_extend_of_other_shapes(page, dim, device):
    check_extend(drawn("mixed", page, dim), [7, 1, 30, 2], 2, torch.float32, device)


def test_more_queries_than_a_program_takes(device):
    batch = build(
        [None, [2, 4, 1, 1, 2, 2]], [150, 90], layers=LAYERS, heads=HEADS, page=8, dim=16,
        dtype=torch.float32,
    )  # fmt: skip
    check_extend(batch, [150, 80], 4, torch.float32, device)


def test_shapes_that_do_not_fit_are_refused(device):
    cache = cached(drawn("mixed"), device)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    for query in (torch.zeros(1, 4, 16), torch.zeros(1, 6, 8), torch.zeros(1, 16, 6).mT):
        with pytest.raises(ValueError, match="does not fit"):
            decode(query.to(device), cache, 0, one, one, 1.0)
        with pytest.raises(ValueError, match="does not fit"):
            extend(query.to(device), cache, 0, one, one, one.new_tensor([0, 1]), 1, 1.0)


def test_rows_are_read_by_request(device):
    """The batch is a choice of rows, in any order."""
    batch = drawn("mixed")
    chosen = torch.tensor([3, 0, 1])
    query = torch.randn(3, HEADS * 2, 16)
    out, _ = decode(
        query.to(device), cached(batch, device), 0, chosen.to(device),
        batch.rows.seq_len[chosen].to(device), 0.25,
    )  # fmt: skip
    rows = Rows(
        batch.rows.req_to_token, chosen, batch.rows.seq_len[chosen],
        batch.rows.segment_begin[chosen], batch.rows.tail_begin[chosen],
        batch.rows.page_start[chosen],
    )  # fmt: skip
    batch.rows = rows
    expected, _ = expected_decode(query, batch, 0, 0.25)
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
