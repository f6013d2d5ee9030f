"""The backend that hands work to FlashInfer does what the one in Triton does.

Without a GPU FlashInfer is emulated (tests/kernels/gpu/emulated.py) and Triton interpreted.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvc_kernels.gpu.flashinfer_decode import supported
from kvc_kernels.gpu.flashinfer_prefill import PagedPrefill
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_kvc.attention import select
from sgl_kvc.attention.backend import KvcAttentionBackend
from sgl_kvc.attention.flashinfer_backend import FlashInferAttentionBackend
from sgl_kvc.cache.request import Request
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.segment import Segment
from sgl_kvc.spec import OFF, Extent, parse

LAYERS, HEADS, GROUP, DIM, PAGE, CONTEXT = 2, 2, 2, 64, 16, 256
DTYPE = torch.float16
LAYER = 1


@pytest.fixture
def runner(device, kernels, tmp_path, monkeypatch):
    """As much of SGLang's model runner as a backend asks for; rows 1 and 2 hold nothing yet."""
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pool = ArenaKVPool(
        40 * PAGE,
        page_size=PAGE,
        dtype=DTYPE,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device=device,
        enable_memory_saver=False,
    )
    torch.manual_seed(0)
    pool.arena_k.normal_()
    pool.arena_v.normal_()
    layers = [
        RadixAttention(HEADS * GROUP, DIM, DIM**-0.5, num_kv_heads=HEADS, layer_id=i)
        for i in range(LAYERS)
    ]
    return SimpleNamespace(
        device=device,
        dtype=DTYPE,
        model=torch.nn.ModuleList(layers),
        token_to_kv_pool=pool,
        req_to_token_pool=ReqToTokenPool(3, CONTEXT, device, False),
        server_args=SimpleNamespace(model_path=str(tmp_path)),
    )


def request_in(backend, row: int) -> Request:
    """The request of a row, which the radix cache would have made known."""
    request = backend.pool.requests.setdefault(f"r{row}", Request(OFF))
    request.row = row
    return request


def batch(backend, mode: ForwardMode, lens: dict[int, tuple[int, int]]) -> SimpleNamespace:
    """Rows with (tokens before, new ones); gives them blocks of their own."""
    at = backend.req_to_token.device
    for row, (prefix, new) in lens.items():
        slots = torch.arange(prefix + new) + (1 + row * 12) * PAGE
        backend.req_to_token[row, : prefix + new] = slots.int().to(at)
        request_in(backend, row)
    prefix, new = ([pair[i] for pair in lens.values()] for i in (0, 1))
    total = [sum(pair) for pair in lens.values()]
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(lens),
        rids=[f"r{row}" for row in lens],
        req_pool_indices=torch.tensor(list(lens), device=at),
        seq_lens=torch.tensor(total, device=at),
        seq_lens_cpu=torch.tensor(total),
        extend_seq_lens=torch.tensor(new, device=at),
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=prefix,
        out_cache_loc=torch.cat(
            [backend.req_to_token[row, a : a + b] for row, (a, b) in lens.items()]
        ).long(),
    )


def answer(backend, mode: ForwardMode, lens: dict[int, tuple[int, int]]) -> torch.Tensor:
    """One layer of a forward of these rows, the same tensors for every backend."""
    given = batch(backend, mode, lens)
    new = len(given.out_cache_loc)
    torch.manual_seed(1)
    widths = (HEADS * GROUP * DIM, HEADS * DIM, HEADS * DIM)
    q, k, v = (torch.randn(new, width).to(backend.cache.arena_k) for width in widths)
    layer = RadixAttention(HEADS * GROUP, DIM, DIM**-0.5, num_kv_heads=HEADS, layer_id=LAYER)
    backend.init_forward_metadata(given)
    forward = backend.forward_decode if mode.is_decode() else backend.forward_extend
    return forward(q, k, v, layer, given)


def skip_unless_supported(kernel: str | None) -> None:
    """Another GPU may not have what the one that is emulated has."""
    model = torch.cuda.get_device_capability(), DIM, PAGE, DTYPE, GROUP
    reason = kernel and supported(kernel, *model)
    if reason:
        pytest.skip(reason)


def compress(backend, row: int) -> None:
    """Two blocks of segment before position 64, of which the heads have 1, 3, 3 and 1 pages."""
    pages = torch.tensor([1, 3, 3, 1], device=backend.req_to_token.device)
    slots = torch.arange(2 * PAGE, 4 * PAGE, device=pages.device) + (1 + row * 12) * PAGE
    segment = Segment(0, 4 * PAGE, slots, pages, PAGE, OFF)
    request_in(backend, row).segment = segment
    backend.spans.install(row, segment)


def test_a_captured_step_reads_a_snapshot(runner):
    """SGLang may change rows and spans as soon as the schedule was made, before the replay."""
    backend = KvcAttentionBackend(runner)
    compress(backend, 1)
    lens = {1: (81, 1), 2: (32, 1)}
    expected = answer(backend, ForwardMode.DECODE, lens)
    backend.init_cuda_graph_state(4, 4)
    given = batch(backend, ForwardMode.DECODE, lens)
    backend.init_forward_metadata_out_graph(given, in_capture=True)
    backend.req_to_token.zero_()
    backend.spans.reset()
    given.seq_lens.zero_()
    torch.manual_seed(1)
    widths = (HEADS * GROUP * DIM, HEADS * DIM, HEADS * DIM)
    q, k, v = (torch.randn(2, width).to(backend.cache.arena_k) for width in widths)
    layer = RadixAttention(HEADS * GROUP, DIM, DIM**-0.5, num_kv_heads=HEADS, layer_id=LAYER)
    assert backend.forward_decode(q, k, v, layer, given).equal(expected)


PREFILL = {"from nothing": {1: (0, 21), 2: (0, 1)}, "chunks": {2: (33, 9), 1: (16, 40)}}


@pytest.mark.parametrize("lens", PREFILL.values(), ids=PREFILL)
def test_prefill(runner, lens):
    expected = answer(KvcAttentionBackend(runner), ForwardMode.EXTEND, lens)
    backend = FlashInferAttentionBackend(runner, None)
    got = answer(backend, ForwardMode.EXTEND, lens)
    assert backend._prefill is not None
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


def test_a_compressed_prefix_is_read_by_triton(runner):
    lens = {1: (70, 9), 2: (0, 5)}
    reference = KvcAttentionBackend(runner)
    compress(reference, 1)
    expected = answer(reference, ForwardMode.EXTEND, lens)
    backend = FlashInferAttentionBackend(runner, None)
    compress(backend, 1)
    assert torch.equal(answer(backend, ForwardMode.EXTEND, lens), expected)
    assert backend._prefill is None


def test_a_request_that_nobody_knows_is_read_by_triton(runner):
    """It could be compressed."""
    expected = answer(KvcAttentionBackend(runner), ForwardMode.EXTEND, PREFILL["chunks"])
    backend = FlashInferAttentionBackend(runner, None)
    backend.requests = lambda forward_batch: [request_in(backend, 2), None]
    assert torch.equal(answer(backend, ForwardMode.EXTEND, PREFILL["chunks"]), expected)
    assert backend._prefill is None


def test_prompts_are_scored_by_what_flashinfer_tells(runner):
    """The log-sum-exp from either kernel gives the same scores."""
    scores, spec = [], parse({"rate": 2, "min_tokens": 0, "policy": "snapkv"})
    for backend in (KvcAttentionBackend(runner), FlashInferAttentionBackend(runner, None)):
        extent, request = Extent.of(spec, 60, PAGE), request_in(backend, 2)
        request.scores = PromptScores(
            spec, extent, list(range(60)), PAGE, LAYERS, backend.pool.facts
        )
        for begin, end in ((0, 32), (32, 60)):
            answer(backend, ForwardMode.EXTEND, {1: (0, 3), 2: (begin, end - begin)})
        scores.append(request.scores._scores[LAYER])
    torch.testing.assert_close(*scores, atol=2e-3, rtol=2e-3)
    assert scores[0].shape == (HEADS, 60)
    assert scores[0].sum() == pytest.approx(32 * HEADS * GROUP, rel=0.2)  # of 32 queries


@pytest.mark.parametrize("kernel", [None, "fa2", "xqa"])
def test_decode(runner, kernel):
    skip_unless_supported(kernel)
    lens = {1: (70, 1), 2: (20, 1)}
    reference = KvcAttentionBackend(runner)
    compress(reference, 1)
    expected = answer(reference, ForwardMode.DECODE, lens)
    backend = FlashInferAttentionBackend(runner, kernel)
    compress(backend, 1)
    got = answer(backend, ForwardMode.DECODE, lens)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    assert (backend._decode is None) == (kernel is None)


def test_captured_batches_share_one_table(runner):
    """Larger ones, which are not captured, get another; the graphs keep theirs."""
    backend = FlashInferAttentionBackend(runner, "xqa")
    backend.init_cuda_graph_state(1, 1)
    answer(backend, ForwardMode.DECODE, {1: (70, 1)})
    captured = backend._decode
    assert captured.buffers.rows == HEADS
    larger = {1: (70, 1), 2: (20, 1)}
    expected = answer(KvcAttentionBackend(runner), ForwardMode.DECODE, larger)
    got = answer(backend, ForwardMode.DECODE, larger)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    assert backend._decode.buffers.rows == 2 * HEADS
    answer(backend, ForwardMode.DECODE, {2: (20, 1)})
    assert backend._decode is captured


def test_an_idle_batch(runner):
    """Of a rank that has nothing to do while others decode."""
    backend = FlashInferAttentionBackend(runner, "fa2")
    answer(backend, ForwardMode.DECODE, {1: (70, 1)})
    device = backend.req_to_token.device
    none = torch.zeros(0, dtype=torch.int64, device=device)
    backend.init_forward_metadata(
        SimpleNamespace(
            forward_mode=ForwardMode.IDLE, batch_size=0, rids=[], req_pool_indices=none,
            seq_lens=none, seq_lens_cpu=none.cpu(), out_cache_loc=none,
        )
    )  # fmt: skip
    assert backend._decode is None


@pytest.mark.parametrize("how", ["wrong", "not there"])
def test_where_flashinfer_cannot_prefill_triton_does(runner, how, monkeypatch, caplog):
    def broken(self, *args, **kwargs):
        if how == "not there":
            raise RuntimeError("nvcc is not there")
        out, lse = real(self, *args, **kwargs)
        return 1.1 * out, lse

    real = PagedPrefill.run
    monkeypatch.setattr(PagedPrefill, "run", broken)
    backend = FlashInferAttentionBackend(runner, None)
    said = "nvcc is not there" if how == "not there" else "not close"
    assert "Triton prefills, not FlashInfer: " in caplog.text
    assert said in caplog.text
    lens = PREFILL["chunks"]
    expected = answer(KvcAttentionBackend(runner), ForwardMode.EXTEND, lens)
    assert torch.equal(answer(backend, ForwardMode.EXTEND, lens), expected)


@pytest.mark.parametrize(
    ("chosen", "fastest", "kind", "kernel"),
    [
        ("auto", None, FlashInferAttentionBackend, None),
        ("auto", "xqa", FlashInferAttentionBackend, "xqa"),
        ("triton", "xqa", KvcAttentionBackend, None),
        ("fa2", "xqa", FlashInferAttentionBackend, "fa2"),
    ],
)
def test_what_is_chosen_on_a_gpu(runner, chosen, fastest, kind, kernel, monkeypatch):
    skip_unless_supported(kernel)
    runner.device = "cuda"  # that of its tensors stays what it is
    monkeypatch.setattr(select, "_warm_up", lambda *_: None)
    monkeypatch.setenv(select.VARIABLE, chosen)
    capability = torch.cuda.get_device_capability()
    monkeypatch.setattr(select, "FASTEST", {capability: fastest} if fastest else {})
    backend = select.create(runner)
    assert type(backend) is kind
    assert getattr(backend, "kernels", None) == kernel


def test_a_model_of_32_bits_is_prefilled_by_triton(runner, caplog):
    runner.dtype = torch.float32
    assert FlashInferAttentionBackend(runner, None)._prefills is None
    assert "16-bit floats" in caplog.text
