"""What is handed to FlashInfer for decode, against the references; or FlashInfer itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kvc_kernels.decode import decode_reference
from kvc_kernels.gpu.decode_buffers import DecodeBuffers
from kvc_kernels.gpu.flashinfer_decode import PagedDecode, bounds_indptr, supported

from tests.kernels.batches import HEADS, LAYERS, RAGGED, TOLERANCE, Drawn, build
from tests.kernels.gpu.emulated import flashinfer

PAGE, DIM = 16, 64


def workspace(device) -> torch.Tensor:
    return torch.zeros(128 << 20 if device == "cuda" else 1, dtype=torch.uint8, device=device)


def drawn(case: str, dtype: torch.dtype) -> Drawn:
    return build(RAGGED[case], page=PAGE, dim=DIM, dtype=dtype, served=True)


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
