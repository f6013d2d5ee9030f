"""What is handed to FlashInfer, against the references; on a GPU FlashInfer itself, too."""

from __future__ import annotations

import math

import pytest
import torch
from kvc_kernels.decode import decode_reference
from kvc_kernels.extend import extend_reference
from kvc_kernels.gpu.flashinfer_decode import DecodePlan, bounds_indptr, supported
from kvc_kernels.gpu.flashinfer_prefill import PrefillPlan, natural, prefix_pages
from kvc_kernels.pages import head_pages
from torch._subclasses import FakeTensorMode

from tests.kernels.batches import RAGGED, TOLERANCE, Batch, build
from tests.kernels.gpu.emulated import attention, flashinfer
from tests.kernels.gpu.test_tables import cached

LAYERS, HEADS, PAGE, DIM = 2, 3, 16, 64


def workspace(device) -> torch.Tensor:
    return torch.zeros(128 << 20 if device == "cuda" else 1, dtype=torch.uint8, device=device)


def drawn(case: str, dtype: torch.dtype) -> Batch:
    return build(*RAGGED[case], layers=LAYERS, heads=HEADS, page=PAGE, dim=DIM, dtype=dtype)


def bounds(batch: Batch) -> list[int]:
    """Per request the most pages of any head, in any layer."""
    each = [p.count.view(-1, HEADS) for p in head_pages(batch.rows, LAYERS, HEADS, PAGE)]
    return torch.stack(each).amax((0, 2)).tolist()


def make_plan(backend, batch, device, group, dtype, most) -> DecodePlan:
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    reason = capability and supported(backend, capability, DIM, PAGE, batch.arena_k.dtype, group)
    if reason:
        pytest.skip(reason)
    cache, requests = cached(batch, device), len(batch.rows.request)
    return DecodePlan(
        backend, cache, requests, HEADS * group, dtype, DIM**-0.5, most, workspace(device)
    )


def check_decode(plan: DecodePlan, batch: Batch, device, group, dtype, order=slice(None)):
    """`plan` has been planned for the requests of `batch` in this order."""
    torch.manual_seed(2)
    flat = [arena.float().view(-1, PAGE, DIM) for arena in (batch.arena_k, batch.arena_v)]
    for layer, pages in enumerate(head_pages(batch.rows, LAYERS, HEADS, PAGE)):
        query = torch.randn(len(batch.rows.request), HEADS * group, DIM).to(dtype)
        expected, _ = decode_reference(query, *flat, pages, DIM**-0.5)
        out = plan.run(layer, query[order].to(device))
        assert out.dtype == dtype
        limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(out.cpu().float(), expected[order], **limits)


@pytest.mark.parametrize(("group", "dtype"), [(1, torch.bfloat16), (4, torch.float16)], ids=str)
@pytest.mark.parametrize("case", RAGGED)
@pytest.mark.parametrize("backend", ["fa2", "xqa", "trtllm"])
def test_decode(kernels, device, backend, case, dtype, group):
    if case == "an idle row" and backend != "fa2":
        pytest.skip("lengths of zero are for fa2 alone")
    batch = drawn(case, dtype)
    pages = bounds(batch)
    plan = make_plan(backend, batch, device, group, dtype, max(pages) + 3)
    plan.plan(batch.rows.request.to(device), batch.rows.seq_len.to(device), pages)
    check_decode(plan, batch, device, group, dtype)


@pytest.mark.parametrize("backend", ["fa2", "xqa"])
def test_decode_again_with_what_the_step_before_left(kernels, device, backend):
    """Requests change places and lengths; the plan's buffers are those of before."""
    batch = drawn("mixed", torch.float16)
    most = max(bounds(batch))
    plan = make_plan(backend, batch, device, 2, torch.float16, most)
    request, seq_len = batch.rows.request.to(device), batch.rows.seq_len.to(device)
    for order in ([0, 1, 2, 3], [1, 3, 0, 2]):
        mine = [bounds(batch)[i] for i in order]
        plan.plan(request[order], seq_len[order], [min(most, n + 1) for n in mine])
        check_decode(plan, batch, device, 2, torch.float16, order)


def test_a_tensor_that_changes_in_place_is_read_again(kernels, device):
    """As in a CUDA graph: `run` reads lengths, and nothing was said to the plan."""
    batch = drawn("mixed", torch.float16)
    plan = make_plan("fa2", batch, device, 1, torch.float16, max(bounds(batch)))
    request, seq_len = batch.rows.request.to(device), batch.rows.seq_len.to(device)
    shorter = seq_len - torch.tensor([6, 0, 14, 0], device=device)
    plan.plan(request, shorter, bounds(batch))
    plan.run(0, torch.randn(4, HEADS, DIM, device=device).half())
    shorter.copy_(seq_len)
    check_decode(plan, batch, device, 1, torch.float16)


def test_fp8_cache_of_tensorrt_gets_an_fp8_query(kernels, device):
    batch = drawn("compressed", torch.float16)
    for name in ("arena_k", "arena_v"):
        setattr(batch, name, getattr(batch, name).to(torch.float8_e4m3fn))
    plan = make_plan("trtllm", batch, device, 2, torch.float16, 8)
    plan.plan(batch.rows.request.to(device), batch.rows.seq_len.to(device))
    query = torch.randn(2, HEADS * 2, DIM, device=device).half()
    assert plan.run(0, query).dtype == torch.float16


def test_a_decode_plan_refuses(kernels, device):
    batch = drawn("mixed", torch.float16)
    plan = make_plan("fa2", batch, device, 2, torch.float16, 5)
    request, seq_len = batch.rows.request.to(device), batch.rows.seq_len.to(device)
    for pages in (None, [1, 2, 3], [1, 2, 3, 6]):
        with pytest.raises(ValueError, match="4 bounds of at most 5"):
            plan.plan(request, seq_len, pages)
    for dtype in torch.float32, torch.bfloat16:
        with pytest.raises(ValueError, match=r"queries of a torch\.float16 cache"):
            make_plan("fa2", batch, device, 2, dtype, 5)
    with pytest.raises(ValueError, match="4 query heads over 3"):
        DecodePlan("fa2", cached(batch, device), 4, 4, torch.float16, 1.0, 5, workspace(device))


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


def prefilled(prefix_lens, new_lens, dtype):
    """An arena with prefixes in blocks out of order; new tokens of two layers beside it."""
    torch.manual_seed(3)
    longest = max(p + n for p, n in zip(prefix_lens, new_lens, strict=True))
    blocks = -(-longest // PAGE)
    rows = torch.randperm(len(new_lens) + 2)[: len(new_lens)]
    order = torch.randperm((len(new_lens) + 2) * blocks).view(-1, blocks)
    slots = (order[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()
    arenas = [torch.randn(order.numel(), LAYERS, HEADS, PAGE, DIM).to(dtype) for _ in "kv"]
    return slots, rows, arenas


@pytest.mark.parametrize("case", PREFIXES)
def test_prefix_pages(device, case):
    prefix_lens, new_lens = PREFIXES[case]
    slots, rows, _ = prefilled(prefix_lens, new_lens, torch.float16)
    indptr, indices, last = prefix_pages(slots.to(device), rows.to(device), prefix_lens, PAGE)
    assert flashinfer.page.get_seq_lens(indptr, last, PAGE).tolist() == prefix_lens
    assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}
    assert indices.device.type == device
    for i, length in enumerate(prefix_lens):
        mine = indices[indptr[i] : indptr[i + 1]].cpu()
        read = (mine[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        assert read.equal(slots[rows[i], :length])


def test_prefix_pages_asks_the_device_for_nothing():
    """Fake tensors have no values: whatever waits for one raises."""
    with FakeTensorMode():
        table = torch.zeros(4, 64, dtype=torch.int32, device="cuda")
        request = torch.zeros(3, dtype=torch.int64, device="cuda")
        indptr, indices, last = prefix_pages(table, request, [3, 0, 33], 16)
        assert indices.shape == (4,)
        assert indices.device.type == "cuda"
        assert indptr.device.type == last.device.type == "cpu"


@pytest.mark.parametrize(("group", "dtype"), [(1, torch.bfloat16), (4, torch.float16)], ids=str)
@pytest.mark.parametrize("case", PREFIXES)
def test_prefill(kernels, device, case, dtype, group):
    prefix_lens, new_lens = PREFIXES[case]
    slots, rows, arenas = prefilled(prefix_lens, new_lens, dtype)
    plan = PrefillPlan(
        workspace(device), query_heads=HEADS * group, heads=HEADS, head_dim=DIM, page_size=PAGE,
        dtype=dtype, kv_dtype=dtype, scale=DIM**-0.5,
    )  # fmt: skip
    plan.plan(slots.to(device), rows.to(device), prefix_lens, new_lens)
    limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for layer in range(LAYERS):
        projected = torch.randn(sum(new_lens), HEADS * (group + 2), DIM).to(dtype)
        query, keys, values = projected.split([HEADS * group, HEADS, HEADS], dim=1)
        expected, expected_lse, begin = [], [], 0
        for row, prefix, new in zip(rows, prefix_lens, new_lens, strict=True):
            now, slot = slice(begin, begin + new), slots[row, :prefix].long()
            mine = [
                torch.cat([arena[slot // PAGE, layer, :, slot % PAGE], fresh[now]])
                for arena, fresh in zip(arenas, (keys, values), strict=True)
            ]
            expected.append(extend_reference(query[now], *mine, DIM**-0.5))
            lse = attention(query[now], *mine, DIM**-0.5, causal=True)[1]
            expected_lse.append(lse * math.log(2))
            begin += new
        parts = projected.to(device).split([HEADS * group, HEADS, HEADS], dim=1)  # strided
        on_device = [*parts, *(arena.to(device) for arena in arenas)]
        out, lse = plan.run(layer, *on_device, with_lse=True)
        torch.testing.assert_close(out.cpu().float(), torch.cat(expected), **limits)
        torch.testing.assert_close(lse.cpu(), torch.cat(expected_lse), **limits)
        alone, nothing = plan.run(layer, *on_device)
        torch.testing.assert_close(alone, out, **limits)
        assert nothing is None


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
