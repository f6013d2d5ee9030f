"""A GPU that is not there, and what of the engine stands on it.

Fake tensors have a device and no values: mixing devices raises, and so does waiting for a value.
Triton's kernels are launched and do not run; attention and store are replaced by what they return.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import kvc_kernels.gpu.decode
import kvc_kernels.gpu.extend
import kvc_kernels.gpu.store
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch._subclasses import FakeTensorMode

from sgl_kvc.attention.backend import KvcAttentionBackend
from sgl_kvc.cache.radix import CompressingRadixCache
from sgl_kvc.cache.request import Request
from sgl_kvc.platform.allocator import TorchPagedAllocator
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.report import Report
from sgl_kvc.spec import Extent, parse
from tests.launches import Launches

LAYERS, HEADS, GROUP, DIM, PAGE, HIDDEN, N = 3, 2, 2, 16, 8, 24, 200
ROW, CONTEXT = 1, 512


class Copied:
    """`HostCopy` of numbers that fake tensors do not have."""

    def __init__(self, tensor: torch.Tensor):
        assert tensor.is_cuda

    def tolist(self) -> list[int]:
        return [1, 7]


@contextlib.contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Fake tensors in the place of a GPU's; what would be launched on it."""

    def on_the_gpu(*tensors):
        assert all(tensor.is_cuda for tensor in tensors if tensor is not None)

    def attention(query, batch, layer, scale, *, metric=None, tracked=None):
        on_the_gpu(query, batch.request, batch.seq_len, metric, tracked)
        assert batch.rows is None, "the host would have to ask for them"
        return torch.empty_like(query), torch.empty(query.shape[:2], device="cuda")

    monkeypatch.setattr(kvc_kernels.gpu.store, "store", on_the_gpu)
    monkeypatch.setattr(kvc_kernels.gpu.decode, "decode", attention)
    monkeypatch.setattr(kvc_kernels.gpu.extend, "extend", attention)
    monkeypatch.setattr("sgl_kvc.pool.segment.HostCopy", Copied)
    with FakeTensorMode(), torch.inference_mode(), Launches(run=False) as launches:
        yield launches


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


def make_pool() -> ArenaKVPool:
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


def make_rows() -> SimpleNamespace:
    table = torch.zeros(3, CONTEXT, dtype=torch.int32, device="cuda")
    return SimpleNamespace(size=2, device="cuda", req_to_token=table)


def compressible(pool, rows, knob: dict) -> tuple[CompressingRadixCache, SimpleNamespace]:
    """A cache, and a prompt in it whose scores are complete."""
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
    request = prefilled(knob, pool.facts, chunks=BOTH)
    request.report = Report.uncompressed(N, cache.block)
    req = SimpleNamespace(
        kvc=request, req_pool_idx=ROW, kv_committed_len=N, last_node=cache.root_node
    )
    return cache, req


def backend_of(pool, rows, tmp_path) -> KvcAttentionBackend:
    server_args = SimpleNamespace(model_path=str(tmp_path))
    return KvcAttentionBackend(
        SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=rows, server_args=server_args)
    )


def scored_batch(
    backend: KvcAttentionBackend, requests: int, knob: dict, known: ModelFacts | None = None
) -> SimpleNamespace:
    """A forward of whole prompts, all of which will be compressed."""
    backend.pool.requests.clear()
    for nth in range(requests):
        request = prefilled(knob, known)
        request.row = nth % 3
        backend.pool.requests[f"{nth}"] = request
    lengths = torch.full((requests,), N, device="cuda")
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.zeros_like(lengths),
        seq_lens=lengths,
        extend_seq_lens_cpu=[N] * requests,
        extend_prefix_lens_cpu=[0] * requests,
        rids=[f"{nth}" for nth in range(requests)],
    )


def observe_all(backend: KvcAttentionBackend, batch: SimpleNamespace) -> None:
    tokens = sum(batch.extend_seq_lens_cpu)
    query = torch.empty(tokens, HEADS * GROUP, DIM, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(tokens, HEADS * GROUP, device="cuda")
    for index in range(LAYERS):
        layer = RadixAttention(HEADS * GROUP, DIM, 0.25, num_kv_heads=HEADS, layer_id=index)
        backend._observe(query, lse, layer, batch)
