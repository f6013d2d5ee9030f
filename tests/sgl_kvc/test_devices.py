"""What a GPU does in torch, on tensors of a GPU that is not there (`fake_gpu`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_kvc.cache import continual
from sgl_kvc.cache.compaction import compress
from sgl_kvc.cache.request import Request
from sgl_kvc.spec import OFF, PRESETS
from tests.sgl_kvc.fake_gpu import (
    BOTH,
    DIM,
    GROUP,
    HEADS,
    LAYERS,
    PAGE,
    ROW,
    N,
    backend_of,
    compressible,
    facts,
    prefilled,
)


@pytest.mark.parametrize("policy", PRESETS)
def test_policies(gpu, policy):
    selection = prefilled({"rate": 4, "policy": policy}, facts(), chunks=BOTH).scores.select()
    assert selection.positions.is_cuda
    assert selection.pages.is_cuda


@pytest.mark.parametrize("policy", ["kv-compress", "r-kv", "triattention"])
def test_compression_and_compressing_again(gpu_pool, gpu_rows, policy):
    knob = {"budget": 64, "recompress_every": 16, "policy": policy}
    cache, req = compressible(gpu_pool, gpu_rows, knob)
    request = req.kvc
    assert compress(cache, req)
    assert request.scores is None
    assert request.segment.row_begin == N // PAGE * PAGE - 64
    assert gpu_pool.spans.is_compressed(ROW)
    assert gpu_pool.spans.tracks_attention(ROW)
    req.kv_committed_len = N + 24
    assert continual.recompress(cache, req)
    assert request.report.recompressed == 1
    assert request.segment.row_begin == (N + 24) // PAGE * PAGE - 64


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("chunk", [(0, 150), (150, 50), None], ids=["first", "last", "decode"])
def test_a_forward(gpu_pool, gpu_rows, tmp_path, chunk, tracked):
    """Prefill of a prompt that will be compressed, beside another; or a decode step of both."""
    backend = backend_of(gpu_pool, gpu_rows, tmp_path)
    if tracked:
        gpu_pool.spans.track(ROW, 2)
    request = prefilled({"rate": 4})
    gpu_pool.requests |= {"scored": request, "other": Request(OFF)}
    before, new = ([N, 9], [1, 1]) if chunk is None else ([chunk[0], 0], [chunk[1], 5])
    tokens, on_gpu = sum(new), {"device": "cuda"}
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if chunk is None else ForwardMode.EXTEND,
        req_pool_indices=torch.zeros(2, dtype=torch.int64, **on_gpu),
        seq_lens=torch.zeros(2, dtype=torch.int64, **on_gpu),
        extend_seq_lens=torch.zeros(2, dtype=torch.int32, **on_gpu),
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=before,
        out_cache_loc=torch.zeros(tokens, dtype=torch.int64, **on_gpu),
        rids=["scored", "other"],
    )
    backend.init_forward_metadata(batch)
    widths = HEADS * GROUP * DIM, HEADS * DIM, HEADS * DIM
    q, k, v = (torch.rand(tokens, width, dtype=torch.bfloat16, **on_gpu) for width in widths)
    forward = backend.forward_decode if chunk is None else backend.forward_extend
    for index in range(LAYERS):
        layer = RadixAttention(HEADS * GROUP, DIM, 0.25, num_kv_heads=HEADS, layer_id=index)
        out = forward(q, k, v, layer, batch)
        assert out.shape == q.shape
        assert out.is_cuda
    assert request.scores.complete == (chunk == (150, 50))
    seen = () if chunk is None or request.scores.complete else range(LAYERS)
    assert list(request.scores._windows) == list(seen)
