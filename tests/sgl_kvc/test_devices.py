"""What a GPU does in torch, on tensors of a GPU that is not there.

Fake tensors have a device and no values: mixing devices raises, and so does waiting for a value.
Triton's launchers are replaced by what they return.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import kvc_kernels.gpu.compact
import kvc_kernels.gpu.score
import kvc_kernels.gpu.select
import kvc_kernels.gpu.store
import pytest
import torch
from kvc_kernels.gpu import decode as triton_decode
from kvc_kernels.gpu import extend as triton_extend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch._subclasses import FakeTensorMode

from sgl_kvc.attention.backend import KvcAttentionBackend
from sgl_kvc.cache import continual
from sgl_kvc.cache.radix import CompressingRadixCache
from sgl_kvc.cache.request import Request
from sgl_kvc.cache.sharing import Sharing
from sgl_kvc.policy.base import ModelFacts
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.report import BlockSize, Report
from sgl_kvc.spec import PRESETS, Extent, parse

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

    def kept_positions(scores, ranks, pages, page_size, total):
        assert pages.is_cuda
        return torch.zeros(total * page_size, dtype=torch.int64, device="cuda")

    def on_the_gpu(*tensors):
        assert all(tensor.is_cuda for tensor in tensors if tensor is not None)

    def attention(query, cache, layer, *given, metric=None, counted=None):
        on_the_gpu(query, *(x for x in given if isinstance(x, torch.Tensor)), metric, counted)
        return torch.empty_like(query), torch.empty(query.shape[:2], device="cuda")

    monkeypatch.setattr(kvc_kernels.gpu.score, "window_attention", window_attention)
    monkeypatch.setattr(kvc_kernels.gpu.select, "kept_positions", kept_positions)
    monkeypatch.setattr(kvc_kernels.gpu.compact, "compact", on_the_gpu)
    monkeypatch.setattr(kvc_kernels.gpu.compact, "move", on_the_gpu)
    monkeypatch.setattr(kvc_kernels.gpu.store, "store", on_the_gpu)
    monkeypatch.setattr(triton_backend, "decode", attention)
    monkeypatch.setattr(triton_backend, "extend", attention)
    monkeypatch.setattr("sgl_kvc.pool.segments.HostCopy", Copied)
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


def observed(knob: dict) -> Plan:
    """A plan that has seen a prompt in two chunks."""
    plan = Plan(parse({"min_tokens": 0} | knob), list(range(N)), PAGE, LAYERS, facts())
    with torch.device("cuda"):
        for begin, end in ((0, 150), (150, N)):
            for layer in range(LAYERS):
                queries = torch.rand(end - begin, HEADS * GROUP, DIM)
                lse = torch.rand(end - begin, HEADS * GROUP)
                cached = torch.rand(2, end, HEADS, DIM).unbind()
                plan.observe(layer, queries, end, lambda cached=cached: cached, 0.25, lse)
    return plan


@pytest.mark.parametrize("policy", PRESETS)
def test_policies(gpu, policy):
    selection = observed({"rate": 4, "policy": policy}).select()
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


def test_compression_and_compressing_again(pool, rows):
    knob = {"budget": 64, "recompress_every": 16}
    segments = pool.bind(rows)
    cache = SimpleNamespace(
        pool=pool,
        page_size=PAGE,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=SimpleNamespace(free_segment=lambda slots, start_pos: None),
        allocate=lambda tokens: torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        behind_forward=lambda *used: contextlib.nullcontext(),
        memory=None,
        plans={ROW: observed(knob)},
        dec_lock_ref=lambda node: None,
        root_node=None,
        block=SimpleNamespace(tokens=PAGE, bytes=1),
    )
    req = SimpleNamespace(req_pool_idx=ROW, kv_committed_len=N, last_node=None, kvc_report={})
    CompressingRadixCache._compress(cache, req, cache.plans[ROW])
    assert segments.begin(ROW) == N // PAGE * PAGE - 64
    req.kv_committed_len = N + 24
    assert continual.recompress(cache, req, parse(knob))
    assert req.kvc_report["decode"]["recompressed"] == 1


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("chunk", [(0, 150), (150, 50), None], ids=["first", "last", "decode"])
def test_a_forward(pool, rows, tmp_path, chunk, counted):
    """Prefill of a prompt that will be compressed, beside another; or a decode step of both."""
    runner = SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=rows,
        server_args=SimpleNamespace(model_path=str(tmp_path)),
    )
    backend = triton_backend.TritonAttentionBackend(runner)
    if counted:
        pool.segments.count(ROW)
    spec = parse({"rate": 4, "min_tokens": 0})
    pool.plans[ROW] = Plan(spec, list(range(N)), PAGE, LAYERS)
    pool.prefilling = [] if chunk is None else [ROW, 2]
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
    assert all(scores is not None for scores in pool.plans[ROW]._scores) == (chunk == (150, 50))
