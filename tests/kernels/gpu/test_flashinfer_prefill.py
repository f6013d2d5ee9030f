"""What is handed to FlashInfer for prefill, against the references; on a GPU FlashInfer itself."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.batch import Batch
from kvc_kernels.cache import KVCache, Spans
from kvc_kernels.extend import extend_reference
from kvc_kernels.gpu import flashinfer_segments
from kvc_kernels.gpu.flashinfer_prefill import PagedPrefill, natural, prefix_pages, try_out
from torch._subclasses import FakeTensorMode

from tests.kernels.batches import HEADS, LAYERS, TOLERANCE, Drawn
from tests.kernels.gpu.emulated import Paged, flashinfer
from tests.kernels.gpu.test_flashinfer import DIM, PAGE, drawn, workspace
from tests.launches import Launches

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
        list(new_lens),
        held,
    )


def moved(batch: Batch, device: str) -> Batch:
    return Drawn(batch, [], [], []).on(device)


@pytest.mark.parametrize("case", PREFIXES)
def test_prefix_pages(device, case):
    batch = prefilled(*PREFIXES[case], torch.float16)
    prefix_lens = PREFIXES[case][0]
    indptr, indices, last = prefix_pages(moved(batch, device), prefix_lens)
    assert flashinfer.page.get_seq_lens(indptr, last, PAGE).tolist() == prefix_lens
    assert {x.dtype for x in (indptr, indices, last)} == {torch.int32}
    assert indices.device.type == device
    for i, (row, length, _) in enumerate(batch.rows):
        mine = indices[indptr[i] : indptr[i + 1]].cpu()
        read = (mine[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        assert read.equal(batch.cache.req_to_token[row, :length])


def test_prefix_pages_asks_the_device_for_nothing():
    """Fake tensors have no values: whatever waits for one raises. Two launches, however many."""
    with FakeTensorMode(), Launches(run=False) as launches:
        arenas = [torch.zeros(9, 2, 3, 16, 64, device="cuda") for _ in "kv"]
        table = torch.zeros(4, 64, dtype=torch.int32, device="cuda")
        cache = KVCache(*arenas, table, Spans.uncompressed(4, 6, "cuda"))
        request = torch.zeros(3, dtype=torch.int64, device="cuda")
        launches.forget()
        indptr, indices, last = prefix_pages(Batch(cache, request, request), [3, 0, 33])
        assert len(launches.kernels) == 1
        assert launches.operations == {"_to_copy": 1}
        assert indices.shape == (4,)
        assert indices.device.type == "cuda"
        assert indptr.device.type == last.device.type == "cpu"


def make_prefill(device, group: int, dtype: torch.dtype, backend: str = "auto") -> PagedPrefill:
    return PagedPrefill(
        workspace(device), query_heads=HEADS * group, heads=HEADS, head_dim=DIM, page_size=PAGE,
        dtype=dtype, kv_dtype=dtype, scale=DIM**-0.5, backend=backend,
    )  # fmt: skip


@pytest.mark.parametrize(("group", "dtype"), [(1, torch.bfloat16), (4, torch.float16)], ids=str)
@pytest.mark.parametrize("case", PREFIXES)
def test_prefill(kernels, device, case, dtype, group):
    batch = prefilled(*PREFIXES[case], dtype)
    prefill = make_prefill(device, group, dtype)
    assert prefill.plan(moved(batch, device), PREFIXES[case][0])
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


@pytest.mark.parametrize("segments", [False, True])
def test_prefill_is_tried_out(kernels, device, segments):
    prefill = make_prefill(device, 2, torch.float16)
    try_out(prefill, torch.device(device), segments=segments)
    assert prefill.reads_segments == segments


#: New tokens of the requests of RAGGED, and which of them are compressed.
CONTEXTS = [
    ("compressed", [0, 5], [0, 1]),
    ("mixed", [7, 1, 30, 2], [1, 3]),
    ("mixed", [3, 1, 31, 8], [0, 1, 3]),
    ("a shared prompt", [3, 16, 0, 1], [0, 1, 2]),
    ("a shared document", [8, 0, 9], [0, 1]),
    ("all spans", [3, 5, 0, 1], [0, 1, 2]),
    ("heads without pages", [0, 3, 0], [0, 1]),
]


def check_contexts(prefill: PagedPrefill, drawn: Drawn, device: str, dtype: torch.dtype) -> None:
    """`prefill` has been planned for `drawn`."""
    limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    tokens, query_heads = sum(drawn.batch.new), prefill.shape[0]
    for layer in range(LAYERS):
        query = torch.randn(tokens, query_heads, DIM).to(dtype)
        given = [x.to(device) for x in (query, *drawn.fresh(layer))]
        out, lse = prefill.run(layer, *given, with_lse=True)
        expected, expected_lse = extend_reference(query, drawn.batch, layer, DIM**-0.5)
        torch.testing.assert_close(out.cpu().float(), expected, **limits)
        torch.testing.assert_close(lse.cpu(), expected_lse, **limits)
        assert prefill.run(layer, *given)[0].equal(out)


@pytest.mark.parametrize(("group", "dtype"), [(1, torch.bfloat16), (4, torch.float16)], ids=str)
@pytest.mark.parametrize("reader", ["fa3", "fa2", "triton"])
@pytest.mark.parametrize(("case", "new", "compressed"), CONTEXTS)
def test_prefill_behind_compressed_contexts(
    kernels, device, case, new, compressed, reader, group, dtype
):
    """Beside others, some of them with a prefix; one that may be compressed need not be."""
    batch = drawn(case, dtype).with_new(new)
    prefill = make_prefill(device, group, dtype, "fa2" if reader == "fa2" else "auto")
    before = [length for _, length, _ in batch.batch.rows]
    if reader == "triton":
        prefill.segments = None
    planned = prefill.plan(batch.on(device), before, compressed, many=1)
    if not planned:
        assert reader == "triton"
        assert len(compressed) == len(new), "Triton does all of it only where all are compressed"
        return
    assert prefill.reads_segments == (reader != "triton")
    check_contexts(prefill, batch, device, dtype)


def test_many_queries_share_a_schedule(kernels, device, monkeypatch):
    """Above 4,096 works a head FA3 plans those of one head for all."""
    monkeypatch.setattr(Paged, "same_above", 3)
    batch = drawn("mixed", torch.float16).with_new([7, 1, 30, 2])
    prefill = make_prefill(device, 4, torch.float16)
    assert prefill.plan(batch.on(device), [x for _, x, _ in batch.batch.rows], [1, 3], many=1)
    check_contexts(prefill, batch, device, torch.float16)


def test_a_plan_that_is_not_known_is_not_run(kernels, device, monkeypatch):
    """Triton reads the contexts; at startup it is said."""
    batch = drawn("mixed", torch.float16).with_new([7, 1, 30, 2])
    before = [length for _, length, _ in batch.batch.rows]
    prefill = make_prefill(device, 4, torch.float16)
    monkeypatch.setattr(flashinfer_segments, "_TILES", {64: 4})
    assert prefill.plan(batch.on(device), before, [1, 3], many=1)
    assert not prefill.reads_segments
    check_contexts(prefill, batch, device, torch.float16)
    with pytest.raises(AssertionError, match="not known"):
        try_out(prefill, torch.device(device), segments=True)


def test_few_new_tokens_behind_compressed_contexts_are_left_to_triton(kernels, device):
    """All of them: nothing is planned. Among others: as few launches as can be."""
    prefill = make_prefill(device, 1, torch.float16)
    batch = drawn("mixed", torch.float16).with_new([3, 1, 30, 2])
    before = [length for _, length, _ in batch.batch.rows]
    assert not prefill.plan(batch.on(device), before, [0, 1, 2, 3])
    assert prefill.plan(batch.on(device), before, [1, 3])
    assert not prefill.reads_segments
    assert prefill._by_triton.tolist() == [1, 3]
    assert prefill.plan(batch.on(device), before, [0, 1, 2, 3], many=36)
    assert prefill.reads_segments
    assert prefill._by_triton is None


def test_natural_undoes_base_two():
    logits = torch.randn(3, 7)
    base_two = torch.log2(logits.exp().sum(-1))
    torch.testing.assert_close(natural(base_two), logits.logsumexp(-1))
