"""The backend that hands decode to FlashInfer does what the one in Triton does.

Without a GPU FlashInfer is emulated (tests/kernels/gpu/emulated.py) and Triton interpreted.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvc_kernels.gpu.flashinfer_decode import supported
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_kvc.attention import select
from sgl_kvc.attention.backend import KvcAttentionBackend
from sgl_kvc.attention.flashinfer_backend import FlashInferAttentionBackend
from tests.sgl_kvc.runners import (
    DIM,
    DTYPE,
    GROUP,
    HEADS,
    LAYER,
    PAGE,
    answer,
    batch,
    compress,
)


def skip_unless_supported(kernel: str | None) -> None:
    """Another GPU may not have what the one that is emulated has."""
    model = torch.cuda.get_device_capability(), DIM, PAGE, DTYPE, GROUP
    reason = kernel and supported(kernel, *model)
    if reason:
        pytest.skip(reason)


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
