"""What is handed to FlashInfer, against the references; on a GPU FlashInfer itself, too."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache, Spans
from kvc_kernels.decode import decode_reference
from kvc_kernels.extend import extend_reference
from kvc_kernels.gpu.decode_buffers import DecodeBuffers
from kvc_kernels.gpu.flashinfer_decode import PagedDecode, bounds_indptr, supported
from kvc_kernels.gpu.flashinfer_prefill import PagedPrefill, natural, prefix_pages, try_out
from torch._subclasses import FakeTensorMode

from tests.kernels.batches import HEADS, LAYERS, RAGGED, TOLERANCE, Drawn, build
from tests.kernels.gpu.emulated import flashinfer

PAGE, DIM = 16, 64


def workspace(device) -> torch.Tensor:
    return torch.zeros(128 << 20 if device == "cuda" else 1, dtype=torch.uint8, device=device)


def drawn(case: str, dtype: torch.dtype) -> Drawn:
    return build(RAGGED[case], page=PAGE, dim=DIM, dtype=dtype)


def bounds(batch: Drawn) -> list[int]:
    """Per request the most pages of any head, in any layer."""
    return [max(len(head) for layer in request for head in layer) for request in batch.pages]


def make_decode(backend, batch, device, group, dtype, most) -> PagedDecode:
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    kv_dtype = batch.cache.arena_k.dtype
    reason = capability and supported(backend, capability, DIM, PAGE, kv_dtype, group)
    if reason:
        pytest.skip(reason)
    cache, requests = batch.on(device).cache, len(batch.keys)
    # Larger than they have to be: those of a batch size are the beginning of what all share.
    buffers = DecodeBuffers(backend, cache, requests + 1, HEADS * group, most)
    return PagedDecode(backend, cache, requests, HEADS * group, dtype, DIM**-0.5, buffers)


def check_decode(paged: PagedDecode, batch: Drawn, device, group, dtype):
    """`paged` has been planned for `batch`."""
    torch.manual_seed(2)
    for layer in range(LAYERS):
        query = torch.randn(len(batch.keys), HEADS * group, DIM).to(dtype)
        expected, _ = decode_reference(query, batch.batch, layer, DIM**-0.5)
        out = paged.run(layer, query.to(device))
        assert out.dtype == dtype
        limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(out.cpu().float(), expected, **limits)


@pytest.mark.parametrize(("group", "dtype"), [(1, torch.bfloat16), (4, torch.float16)], ids=str)
@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("backend", ["fa2", "xqa", "trtllm"])
def test_decode(kernels, device, backend, case, dtype, group):
    if case in ("an idle row", "heads without pages") and backend != "fa2":
        pytest.skip("lengths of zero are for fa2 alone")
    batch = drawn(case, dtype)
    paged = make_decode(backend, batch, device, group, dtype, max(bounds(batch)) + 3)
    paged.plan(batch.on(device), bounds(batch))
    check_decode(paged, batch, device, group, dtype)


@pytest.mark.parametrize("backend", ["fa2", "xqa"])
def test_decode_again_with_what_the_step_before_left(kernels, device, backend):
    """Requests change places and lengths; the buffers are those of before."""
    batch = drawn("all spans", torch.float16)
    most = max(bounds(batch))
    paged = make_decode(backend, batch, device, 2, torch.float16, most)
    for order in ([0, 1, 2, 3], [1, 3, 0, 2]):
        mine = batch.choose(order)
        paged.plan(mine.on(device), [min(most, pages + 1) for pages in bounds(mine)])
        check_decode(paged, mine, device, 2, torch.float16)


def test_a_tensor_that_changes_in_place_is_read_again(kernels, device):
    """As in a CUDA graph: `run` reads lengths, and nothing was said before."""
    batch = drawn("mixed", torch.float16)
    paged = make_decode("fa2", batch, device, 1, torch.float16, max(bounds(batch)))
    on_device = batch.on(device)
    shorter = on_device.seq_len - torch.tensor([6, 0, 14, 0], device=device)
    paged.plan(dataclasses.replace(on_device, seq_len=shorter), bounds(batch))
    paged.run(0, torch.randn(4, HEADS, DIM, device=device).half())
    shorter.copy_(on_device.seq_len)
    check_decode(paged, batch, device, 1, torch.float16)


def test_fp8_cache_of_tensorrt_gets_an_fp8_query(kernels, device):
    batch = drawn("compressed", torch.float16).to(torch.float8_e4m3fn)
    paged = make_decode("trtllm", batch, device, 2, torch.float16, 8)
    paged.plan(batch.on(device))
    query = torch.randn(2, HEADS * 2, DIM, device=device).half()
    assert paged.run(0, query).dtype == torch.float16


def test_what_decode_does_not_take_is_refused(kernels, device):
    batch = drawn("mixed", torch.float16)
    paged = make_decode("fa2", batch, device, 2, torch.float16, 5)
    for pages in (None, [1, 2, 3], [1, 2, 3, 6]):
        with pytest.raises(ValueError, match="4 bounds of at most 5"):
            paged.plan(batch.on(device), pages)
    for dtype in torch.float32, torch.bfloat16:
        with pytest.raises(ValueError, match=r"queries of a torch\.float16 cache"):
            make_decode("fa2", batch, device, 2, dtype, 5)
    cache = batch.on(device).cache
    with pytest.raises(ValueError, match="4 query heads over 3"):
        PagedDecode("fa2", cache, 4, 4, torch.float16, 1.0, paged.buffers)
    for requests in (0, 6):
        with pytest.raises(ValueError, match=f"{requests} requests are none, or more"):
            PagedDecode("fa2", cache, requests, 2 * HEADS, torch.float16, 1.0, paged.buffers)


def test_bounds_are_lengths_in_whole_pages():
    lengths = flashinfer.page.get_seq_lens(
        bounds_indptr([3, 0, 1], 2), torch.full((6,), PAGE, dtype=torch.int32), PAGE
    )
    assert bounds_indptr([3, 0, 1], 2).tolist() == [0, 3, 6, 6, 6, 7, 8]
    assert bounds_indptr([3, 0, 1], 2).dtype == torch.int32
    assert lengths[[0, 1, 4, 5]].tolist() == [48, 48, 16, 16]


PREFIXES = {
    "none": ([0, 0], [5, 1]),
    "edges": ([1, 15, 16, 17, 0], [3, 1, 2, 16, 4]),
    "one request": ([33], [7]),
    "last has none": ([32, 0], [1, 9]),
}


def prefilled(prefix_lens, new_lens, dtype) -> Batch:
    """Uncompressed requests whose blocks, and rows, are in no order."""
    torch.manual_seed(3)
    longest = max(p + n for p, n in zip(prefix_lens, new_lens, strict=True))
    blocks, rows = -(-longest // PAGE), len(new_lens) + 2
    order = torch.randperm(rows * blocks).view(-1, blocks)
    slots = (order[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()
    arenas = [torch.randn(order.numel(), LAYERS, HEADS, PAGE, DIM).to(dtype) for _ in "kv"]
    request = torch.randperm(rows)[: len(new_lens)]
    held = list(zip(request.tolist(), prefix_lens, new_lens, strict=True))
    return Batch(
        KVCache(*arenas, slots, Spans.uncompressed(rows, LAYERS * HEADS, "cpu")),
        request,
        torch.tensor([before + new for _, before, new in held]),
        torch.tensor([0, *new_lens]).cumsum(0),
        max(new_lens),
        held,
    )


def moved(batch: Batch, device: str) -> Batch:
    return Drawn(batch, [], [], []).on(device)


@pytest.mark.parametrize("case", PREFIXES)
def test_prefix_pages(device, case):
    batch = prefilled(*PREFIXES[case], torch.float16)
    prefix_lens = PREFIXES[case][0]
    indptr, indices, last = prefix_pages(moved(batch, device))
    assert flashinfer.page.get_seq_lens(indptr, last, PAGE).tolist() == prefix_lens
    assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}
    assert indices.device.type == device
    for i, (row, length, _) in enumerate(batch.rows):
        mine = indices[indptr[i] : indptr[i + 1]].cpu()
        read = (mine[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        assert read.equal(batch.cache.req_to_token[row, :length])


def test_prefix_pages_asks_the_device_for_nothing():
    """Fake tensors have no values: whatever waits for one raises."""
    with FakeTensorMode():
        arenas = [torch.zeros(9, 2, 3, 16, 64, device="cuda") for _ in "kv"]
        table = torch.zeros(4, 64, dtype=torch.int32, device="cuda")
        cache = KVCache(*arenas, table, Spans.uncompressed(4, 6, "cuda"))
        request = torch.zeros(3, dtype=torch.int64, device="cuda")
        rows = [(0, 3, 1), (0, 0, 1), (0, 33, 1)]
        indptr, indices, last = prefix_pages(Batch(cache, request, request, rows=rows))
        assert indices.shape == (4,)
        assert indices.device.type == "cuda"
        assert indptr.device.type == last.device.type == "cpu"


def make_prefill(device, group: int, dtype: torch.dtype) -> PagedPrefill:
    return PagedPrefill(
        workspace(device), query_heads=HEADS * group, heads=HEADS, head_dim=DIM, page_size=PAGE,
        dtype=dtype, kv_dtype=dtype, scale=DIM**-0.5,
    )  # fmt: skip


@pytest.mark.parametrize(("group", "dtype"), [(1, torch.bfloat16), (4, torch.float16)], ids=str)
@pytest.mark.parametrize("case", PREFIXES)
def test_prefill(kernels, device, case, dtype, group):
    batch = prefilled(*PREFIXES[case], dtype)
    prefill = make_prefill(device, group, dtype)
    prefill.plan(moved(batch, device))
    limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    at = torch.cat([
        batch.cache.req_to_token[row, before : before + new] for row, before, new in batch.rows
    ]).long()  # fmt: skip
    for layer in range(LAYERS):
        projected = torch.randn(len(at), HEADS * (group + 2), DIM).to(dtype)
        query, *fresh = projected.split([HEADS * group, HEADS, HEADS], dim=1)
        for arena, tokens in zip((batch.cache.arena_k, batch.cache.arena_v), fresh, strict=True):
            arena[at // PAGE, layer, :, at % PAGE] = tokens
        expected, expected_lse = extend_reference(query, batch, layer, DIM**-0.5)
        parts = projected.to(device).split([HEADS * group, HEADS, HEADS], dim=1)  # strided
        out, lse = prefill.run(layer, *parts, with_lse=True)
        torch.testing.assert_close(out.cpu().float(), expected, **limits)
        torch.testing.assert_close(lse.cpu(), expected_lse, **limits)
        alone, nothing = prefill.run(layer, *parts)
        torch.testing.assert_close(alone, out, **limits)
        assert nothing is None


def test_prefill_is_tried_out(kernels, device):
    try_out(make_prefill(device, 2, torch.float16), torch.device(device))


def test_natural_undoes_base_two():
    logits = torch.randn(3, 7)
    base_two = torch.log2(logits.exp().sum(-1))
    torch.testing.assert_close(natural(base_two), logits.logsumexp(-1))


@pytest.mark.parametrize(
    ("backend", "capability", "dim", "page", "dtype", "group", "reason"),
    [
        ("fa2", (8, 0), 128, 8, torch.bfloat16, 1, None),
        ("fa2", (12, 0), 256, 64, torch.float8_e5m2, 16, None),
        ("fa2", (7, 5), 128, 16, torch.float16, 4, "8.0"),
        ("fa2", (9, 0), 96, 16, torch.float16, 4, "head dim of 64, 128 or 256"),
        ("fa2", (9, 0), 64, 16, torch.float8_e4m3fn, 4, "with fp8"),
        ("fa2", (9, 0), 64, 16, torch.float32, 4, "16-bit"),
        ("xqa", (9, 0), 96, 16, torch.bfloat16, 32, None),
        ("xqa", (12, 1), 256, 128, torch.float8_e4m3fn, 8, None),
        ("xqa", (8, 9), 128, 16, torch.bfloat16, 4, "capability"),
        ("xqa", (9, 0), 128, 8, torch.bfloat16, 4, "pages"),
        ("xqa", (9, 0), 128, 16, torch.float8_e5m2, 4, "e4m3"),
        ("xqa", (9, 0), 128, 16, torch.float16, 33, "at most 32"),
        ("xqa", (8, 9), 128, 8, torch.float16, 4, "12 and pages"),
        ("trtllm", (10, 0), 128, 32, torch.float8_e4m3fn, 8, None),
        ("trtllm", (9, 0), 128, 32, torch.bfloat16, 8, "capability 10"),
        ("trtllm", (10, 3), 96, 32, torch.bfloat16, 8, "head dim"),
        ("fa3", (9, 0), 128, 32, torch.bfloat16, 8, "no backend 'fa3'"),
    ],
)
def test_supported(backend, capability, dim, page, dtype, group, reason):
    said = supported(backend, capability, dim, page, dtype, group)
    assert said is None if reason is None else reason in said


@pytest.mark.parametrize("page", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("dim", [8, 16, 24, 64, 96, 128, 256, 272])
def test_xqa_is_supported_where_flashinfer_generates_it(monkeypatch, page, dim):
    from flashinfer.jit import core, xqa

    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setattr(core, "current_compilation_context", core.CompilationContext())
    half = torch.float16
    said = supported("xqa", (9, 0), dim, page, half, 4)
    try:
        xqa.gen_xqa_module(half, half, page, dim, 4, False, half)
    except ValueError:
        assert said
    else:
        assert said is None
