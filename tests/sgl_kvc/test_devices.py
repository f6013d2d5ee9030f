"""What a GPU does in torch, on tensors of a GPU that is not there.

Fake tensors have a device and no values: mixing devices raises, and so does waiting for a value.
Triton's launchers are replaced by what they return.
"""

from __future__ import annotations

from types import SimpleNamespace

import kvc_kernels.gpu.compact
import kvc_kernels.gpu.decode
import kvc_kernels.gpu.extend
import kvc_kernels.gpu.score
import kvc_kernels.gpu.select
import kvc_kernels.gpu.store
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch._subclasses import FakeTensorMode

from sgl_kvc.attention.backend import KvcAttentionBackend
from sgl_kvc.cache import continual
from sgl_kvc.cache.compaction import compress
from sgl_kvc.cache.radix import CompressingRadixCache
from sgl_kvc.cache.request import Request
from sgl_kvc.platform.allocator import TorchPagedAllocator
from sgl_kvc.policy.base import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.report import Report
from sgl_kvc.spec import OFF, PRESETS, Extent, parse

LAYERS, HEADS, GROUP, DIM, PAGE, HIDDEN, N = 3, 2, 2, 16, 8, 24, 200
ROW, CONTEXT = 1, 512


class Copied:
    """`HostCopy` of numbers that fake tensors do not have."""

    def __init__(self, tensor: torch.Tensor):
        assert tensor.is_cuda

    def tolist(self) -> list[int]:
        return [1, 7]


@pytest.fixture
def gpu(monkeypatch):
    def window_attention(queries, layer_k, slots, *args, lse=None, **kwargs):
        assert queries.is_cuda
        assert layer_k.is_cuda
        assert lse is None or lse.is_cuda
        return torch.empty(layer_k.shape[1], len(slots), device="cuda")

    def window_lse(queries, layer_k, slots, scale):
        assert queries.is_cuda
        assert layer_k.is_cuda
        assert slots.is_cuda
        return torch.empty(queries.shape[:2], device="cuda")

    def kept_positions(scores, ranks, pages, page_size, total):
        assert pages.is_cuda
        return torch.zeros(total * page_size, dtype=torch.int64, device="cuda")

    def on_the_gpu(*tensors):
        assert all(tensor.is_cuda for tensor in tensors if tensor is not None)

    def attention(query, batch, layer, scale, *, metric=None, tracked=None):
        on_the_gpu(query, batch.request, batch.seq_len, batch.start, metric, tracked)
        assert batch.rows is None, "the host would have to ask for them"
        return torch.empty_like(query), torch.empty(query.shape[:2], device="cuda")

    monkeypatch.setattr(kvc_kernels.gpu.score, "window_attention", window_attention)
    monkeypatch.setattr(kvc_kernels.gpu.score, "window_lse", window_lse)
    monkeypatch.setattr(kvc_kernels.gpu.select, "kept_positions", kept_positions)
    monkeypatch.setattr(kvc_kernels.gpu.compact, "compact", on_the_gpu)
    monkeypatch.setattr(kvc_kernels.gpu.compact, "move", on_the_gpu)
    monkeypatch.setattr(kvc_kernels.gpu.store, "store", on_the_gpu)
    monkeypatch.setattr(kvc_kernels.gpu.decode, "decode", attention)
    monkeypatch.setattr(kvc_kernels.gpu.extend, "extend", attention)
    monkeypatch.setattr("sgl_kvc.pool.segment.HostCopy", Copied)
    with FakeTensorMode(), torch.inference_mode():
        yield


def facts() -> ModelFacts:
    """As `read_facts` makes them: token ids stay on the host."""
    with torch.device("cuda"):
        return ModelFacts(
            cos_sin=torch.rand(1024, DIM),
            output_projection=[torch.rand(HIDDEN, HEADS * GROUP * DIM) for _ in range(LAYERS)],
            special_tokens=torch.tensor([0, 1], device="cpu"),
            punctuation=torch.tensor([2, 3], device="cpu"),
            head_profile=torch.rand(LAYERS, HEADS),
        )


def prefilled(knob: dict, known: ModelFacts | None = None, *, chunks: tuple = ()) -> Request:
    """A request in row ROW whose scores have seen these chunks of its prompt."""
    request = Request(parse({"min_tokens": 0} | knob))
    request.row = ROW
    extent = request.extent = Extent.of(request.spec, N, PAGE)
    assert extent.compressed
    scores = PromptScores(request.spec, extent, list(range(N)), PAGE, LAYERS, known)
    request.scores = scores
    with torch.device("cuda"):
        for begin, end in chunks:
            for layer in range(LAYERS):
                queries = torch.rand(end - begin, HEADS * GROUP, DIM)
                lse = torch.rand(end - begin, HEADS * GROUP)
                cached = PromptKVs.of(*torch.rand(2, end, HEADS, DIM).unbind())
                scores.observe(layer, queries, cached, 0.25, lse)
    return request


BOTH = ((0, 150), (150, N))


@pytest.mark.parametrize("policy", PRESETS)
def test_policies(gpu, policy):
    selection = prefilled({"rate": 4, "policy": policy}, facts(), chunks=BOTH).scores.select()
    assert selection.positions.is_cuda
    assert selection.pages.is_cuda


@pytest.fixture
def pool(gpu) -> ArenaKVPool:
    return ArenaKVPool(
        60 * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cuda",
        enable_memory_saver=False,
    )


@pytest.fixture
def rows(gpu) -> SimpleNamespace:
    table = torch.zeros(3, CONTEXT, dtype=torch.int32, device="cuda")
    return SimpleNamespace(size=2, device="cuda", req_to_token=table)


@pytest.mark.parametrize("policy", ["kv-compress", "r-kv", "triattention"])
def test_compression_and_compressing_again(pool, rows, policy):
    pool.bind(rows)
    pool.facts = facts()
    allocator = TorchPagedAllocator(60 * PAGE, PAGE, torch.bfloat16, "cuda", pool, need_sort=False)
    cache = CompressingRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
        )
    )
    knob = {"budget": 64, "recompress_every": 16, "policy": policy}
    request = prefilled(knob, pool.facts, chunks=BOTH)
    request.report = Report.uncompressed(N, cache.block)
    req = SimpleNamespace(
        kvc=request, req_pool_idx=ROW, kv_committed_len=N, last_node=cache.root_node
    )
    assert compress(cache, req)
    assert request.scores is None
    assert request.segment.row_begin == N // PAGE * PAGE - 64
    assert pool.spans.is_compressed(ROW)
    assert pool.spans.tracks_attention(ROW)
    req.kv_committed_len = N + 24
    assert continual.recompress(cache, req)
    assert request.report.recompressed == 1
    assert request.segment.row_begin == (N + 24) // PAGE * PAGE - 64


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("chunk", [(0, 150), (150, 50), None], ids=["first", "last", "decode"])
def test_a_forward(pool, rows, tmp_path, chunk, tracked):
    """Prefill of a prompt that will be compressed, beside another; or a decode step of both."""
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=rows,
        server_args=SimpleNamespace(model_path=str(tmp_path)),
    )
    backend = KvcAttentionBackend(runner)
    if tracked:
        pool.spans.track(ROW, 2)
    request = prefilled({"rate": 4})
    pool.requests |= {"scored": request, "other": Request(OFF)}
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
