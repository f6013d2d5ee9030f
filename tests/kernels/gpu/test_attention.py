"""Decode and extend in Triton against the float32 references, over ragged batches of spans."""

from __future__ import annotations

import itertools

import pytest
import torch
from kvc_kernels.batch import Batch, head_kvs_reference
from kvc_kernels.decode import decode_reference
from kvc_kernels.extend import attend_reference, extend_reference
from kvc_kernels.gpu.decode import decode, new_schedule
from kvc_kernels.gpu.extend import add_prefix, extend

from tests.kernels.batches import HEADS, LAYERS, RAGGED, TOLERANCE, Drawn, Row, build
from tests.kernels.test_attention import NEW, plain_decode
from tests.kernels.test_attention import check_extend as check_one_layer


def scheduled(drawn: Drawn, query: torch.Tensor, device: str, programs: int) -> Batch:
    """The batch on the device; so many programs share its work, in tiles of two pages or so."""
    batch, (requests, query_heads, _) = drawn.on(device), query.shape
    made = new_schedule(batch.cache, requests, query_heads, query.dtype, programs=programs, tile=16)
    for tensor in (made.heads, made.blocks, made.starts, made.cuts):
        tensor.fill_(1 << 30)  # what is read without having been written does harm
    made.update(batch)
    return batch


def check_decode(drawn: Drawn, group: int, dtype: torch.dtype, device: str, programs: int):
    dim = drawn.cache.arena_k.shape[-1]
    torch.manual_seed(1)
    query = torch.randn(len(drawn.keys), HEADS * group, dim).to(dtype)
    batch = scheduled(drawn, query, device, programs)
    for layer in range(LAYERS):
        out, lse = decode(query.to(device), batch, layer, dim**-0.5)
        expected, expected_lse = decode_reference(query, drawn.batch, layer, dim**-0.5)
        assert out.dtype == dtype
        limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(out.cpu().float(), expected, **limits)
        torch.testing.assert_close(lse.cpu(), expected_lse, **limits)


@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode(case, programs, dtype, device):
    check_decode(build(RAGGED[case], dtype=dtype), 4, dtype, device, programs)


@pytest.mark.parametrize("group", [1, 2, 5, 16])
def test_decode_of_query_groups(group, device):
    check_decode(build(RAGGED["all spans"]), group, torch.float32, device, 2)


@pytest.mark.parametrize(
    ("page", "dim"), [(8, 64), (16, 96), (32, 128), (64, 256), (16, 24)], ids=str
)
def test_decode_of_other_shapes(page, dim, device):
    drawn = build(RAGGED["all spans"], page=page, dim=dim, dtype=torch.float16)
    check_decode(drawn, 2, torch.float16, device, 2)


@pytest.mark.parametrize("tail", [0, 1, 7, 8, 9])
def test_decode_at_the_edges_of_a_page(tail, device):
    rows = [Row(tail), Row(tail, [1] * 6), Row(tail, shared=2), Row(tail, [2] * 6, [2] * 6)]
    check_decode(build(rows), 2, torch.float32, device, 2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_decode_of_a_cache_in_eight_bits(dtype, device):
    drawn = build(RAGGED["all spans"], dtype=torch.float16).to(dtype)
    query = torch.randn(len(drawn.keys), HEADS * 2, 16).half()
    out, _ = decode(query.to(device), scheduled(drawn, query, device, 2), 1, 0.25)
    expected = plain_decode(query, drawn, 1, 0.25)
    torch.testing.assert_close(out.cpu().float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("case", ["mixed", "all spans", "a shared document"])
@pytest.mark.parametrize("programs", [1, 5])
def test_the_metric_of_tracked_requests(case, programs, device):
    """Nothing is added to KVs of shared spans, or to those of other requests."""
    drawn = build(RAGGED[case])
    query = torch.randn(len(drawn.keys), HEADS * 2, 16)
    tracked = 1 + torch.arange(len(drawn.cache.req_to_token), dtype=torch.int32) % 2
    tracked[3] = 0
    metric = torch.rand(drawn.cache.arena_k.shape[:-1])
    expected, got = metric.clone(), metric.to(device)
    decode_reference(query, drawn.batch, 1, 0.25, metric=expected, tracked=tracked)
    batch = scheduled(drawn, query, device, programs)
    decode(query.to(device), batch, 1, 0.25, metric=got, tracked=tracked.to(device))
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(expected, metric)


def check_extend(drawn: Drawn, new: list[int], group: int, dtype: torch.dtype, device: str):
    """The last `new` tokens of every request are asked about; every head has its own prefix."""
    dim, drawn = drawn.cache.arena_k.shape[-1], drawn.with_new(new)
    torch.manual_seed(2)
    query = torch.randn(sum(new), HEADS * group, dim).to(dtype)
    for layer in range(LAYERS):
        got = extend(query.to(device), drawn.on(device), layer, 0.25)
        check_one_layer(got, query, drawn, layer, dtype)


@pytest.mark.parametrize(("case", "new"), NEW)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_extend(case, new, dtype, device):
    check_extend(build(RAGGED[case], dtype=dtype), new, 4, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_extend_over_a_cache_in_eight_bits(dtype, device):
    drawn = build(RAGGED["all spans"], dtype=torch.float16).to(dtype)
    check_extend(drawn, [3, 5, 0, 1], 2, torch.float16, device)


@pytest.mark.parametrize("group", [1, 3, 16])
def test_extend_of_query_groups(group, device):
    check_extend(build(RAGGED["all spans"]), [3, 5, 0, 1], group, torch.float32, device)


@pytest.mark.parametrize(("page", "dim"), [(32, 64), (16, 96), (8, 256)], ids=str)
def test_extend_of_other_shapes(page, dim, device):
    drawn = build(RAGGED["all spans"], page=page, dim=dim)
    check_extend(drawn, [3, 5, 0, 1], 2, torch.float32, device)


def test_more_queries_than_a_program_takes(device):
    drawn = build([Row(150), Row(90, [2, 4, 1, 1, 2, 2], 1)])
    check_extend(drawn, [150, 80], 4, torch.float32, device)


def test_rows_are_read_by_request(device):
    """The batch is a choice of rows, in any order."""
    check_decode(build(RAGGED["all spans"]).choose([3, 0, 1]), 2, torch.float32, device, 1)


def test_the_operations_take_triton_where_it_is_asked_for(device, monkeypatch):
    from kvc_kernels import decode as plain_decode_module
    from kvc_kernels import extend as plain_extend_module

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    drawn = build(RAGGED["all spans"]).with_new([1, 1, 0, 1])
    query, batch = torch.randn(4, HEADS * 2, 16, device=device), drawn.on(device)
    got = plain_decode_module.decode(query, batch, 1, 0.25)
    assert got[0].equal(decode(query, batch, 1, 0.25)[0])
    out, lse = plain_extend_module.extend(query[:3], batch, 1, 0.25)
    assert out.equal(extend(query[:3], batch, 1, 0.25)[0])
    keys, _ = head_kvs_reference(drawn.batch, 0, 1, 0)
    expected = (query[0, :2].cpu() @ keys.T * 0.25).logsumexp(-1)
    torch.testing.assert_close(lse[0, :2].cpu(), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("case", "new"), [each for each in NEW if each[0] != "an idle row"])
def test_a_prefix_joins_the_attention_of_new_tokens(case, new, dtype, device):
    """Of the requests that are chosen; nothing of the others is touched."""
    drawn = build(RAGGED[case], dtype=dtype).with_new(new)
    query = torch.randn(sum(new), HEADS * 2, 16).to(dtype)
    batch, chosen = drawn.on(device), list(range(len(new) - 1, -1, -2))
    among_new = among_new_tokens(drawn, query, 1)
    expected = extend_reference(query, drawn.batch, 1, 0.25)
    out, lse = (x.to(device) for x in (among_new[0].to(dtype), among_new[1]))
    add_prefix(query.to(device), batch, 1, 0.25, torch.tensor(chosen, device=device), out, lse)
    limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for request, (begin, end) in enumerate(itertools.pairwise(drawn.batch.start.tolist())):
        wanted = expected if request in chosen else among_new
        for got, one in zip((out, lse), wanted, strict=True):
            torch.testing.assert_close(got[begin:end].cpu().float(), one[begin:end], **limits)


def among_new_tokens(drawn, query, layer) -> tuple[torch.Tensor, torch.Tensor]:
    """What the new tokens of every request have of themselves alone; float32."""
    parts = [
        attend_reference(query[begin:end], *(x[begin:end] for x in drawn.fresh(layer)), 0.25)
        for begin, end in itertools.pairwise(drawn.batch.start.tolist())
    ]
    out, lse = (torch.cat(each) for each in zip(*parts, strict=True))
    return out, lse
