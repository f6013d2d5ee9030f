"""What a GPU is launched with in a prefill by FlashInfer, on tensors that are not there."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_kvc.attention import flashinfer_backend
from sgl_kvc.attention.flashinfer_backend import FlashInferAttentionBackend
from sgl_kvc.cache.request import Request
from sgl_kvc.spec import OFF
from tests.sgl_kvc.fake_gpu import DIM, GROUP, HEADS, LAYERS, N, prefilled

flashinfer = pytest.importorskip("flashinfer")


class Fake:
    """One of FlashInfer's wrappers: takes what it takes, and says when it is run."""

    runs: list[str]

    def __init__(self, workspace, layout, *, backend):
        self._backend = "fa2"
        self._rows = torch.zeros(64, dtype=torch.int32, device="cuda")

    def plan(self, *args, **kwargs):
        plan = inspect.signature(self.real.plan).bind(self, *args, **kwargs).arguments
        for name, given in plan.items():
            assert not isinstance(given, torch.Tensor) or given.is_cuda == ("indices" in name)
        self._paged_kv_last_page_len_buf = self._rows[: len(plan["qo_indptr"]) - 1]

    def run(self, query, *_cache, return_lse=False, **_options):
        self.runs.append(self.name)
        lse = torch.empty(query.shape[:2], device="cuda")
        return (torch.empty_like(query), lse) if return_lse else torch.empty_like(query)


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """FlashInfer's kernels, in the order they are run."""
    runs: list[str] = []
    for name, real in (
        ("ragged", flashinfer.BatchPrefillWithRaggedKVCacheWrapper),
        ("paged", flashinfer.BatchPrefillWithPagedKVCacheWrapper),
    ):
        kind = type("Kind", (Fake,), {"name": name, "real": real, "runs": runs})
        monkeypatch.setattr(flashinfer, real.__name__, kind)

    def merge(out, lse, *_):
        runs.append("merge")
        return torch.empty_like(out), torch.empty_like(lse)

    monkeypatch.setattr(flashinfer, "merge_state", merge)
    monkeypatch.setattr(flashinfer_backend, "try_out", lambda *_, **__: None)
    monkeypatch.setattr(flashinfer_backend, "supported", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return runs


@pytest.fixture
def backend(gpu_pool, gpu_rows, tmp_path, runs) -> FlashInferAttentionBackend:
    first = RadixAttention(HEADS * GROUP, DIM, 0.25, num_kv_heads=HEADS, layer_id=0)
    backend = FlashInferAttentionBackend(
        SimpleNamespace(
            token_to_kv_pool=gpu_pool,
            req_to_token_pool=gpu_rows,
            dtype=torch.bfloat16,
            model=torch.nn.ModuleList([first]),
            server_args=SimpleNamespace(model_path=str(tmp_path)),
        ),
        None,
    )
    runs.clear()  # of the warm-up
    return backend


def prefill(backend, gpu, before: list[int], new: list[int], requests: list[Request]):
    """A forward: Triton's kernels and torch's operations before its layers, and of a layer."""
    backend.pool.requests |= {str(nth): each for nth, each in enumerate(requests)}
    lengths = torch.zeros(len(new), dtype=torch.int64, device="cuda")
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(new),
        req_pool_indices=torch.zeros_like(lengths),
        seq_lens=lengths,
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=before,
        out_cache_loc=torch.zeros(sum(new), dtype=torch.int64, device="cuda"),
        rids=[str(nth) for nth in range(len(requests))],
    )
    widths = HEADS * GROUP * DIM, HEADS * DIM, HEADS * DIM
    given = [torch.rand(sum(new), width, device="cuda").bfloat16() for width in widths]
    gpu.forget()
    backend.init_forward_metadata(batch)
    found = [[kernel.name for kernel in gpu.kernels], dict(gpu.operations)]
    gpu.forget()
    for index in range(LAYERS):
        layer = RadixAttention(HEADS * GROUP, DIM, 0.25, num_kv_heads=HEADS, layer_id=index)
        backend.forward_extend(*given, layer, batch)
    found += [[kernel.name for kernel in gpu.kernels], dict(gpu.operations)]
    return found


def request(**known) -> Request:
    made = Request(OFF)
    made.row = 1
    vars(made).update(known)
    return made


def test_without_compression_nothing_is_launched_but_attention(backend, gpu, runs):
    """Stores apart, which FlashInfer has as well; and a page table if there is a prefix."""
    assert prefill(backend, gpu, [0, 0], [40, 3], [request(), request()]) == [[], {}, [], {}]
    assert runs == ["ragged"] * LAYERS
    runs.clear()
    found = prefill(backend, gpu, [0, 9], [40, 3], [request(), request()])
    assert found == [["_prefix_blocks"], {"to": 1}, [], {}]
    assert runs == ["ragged", "paged", "merge"] * LAYERS


def test_a_compressed_request_among_others(backend, gpu, runs):
    """One kernel a layer and the logarithm's base; or eight launches for many new tokens."""
    requests = [request(), *(request(segment=object()) for _ in range(2))]
    found = prefill(backend, gpu, [0, 9, 9], [40, 3, 3], requests)
    assert found == [[], {"to": 1}, ["_extend"] * LAYERS, {"to": 1, "mul": LAYERS}]
    assert runs == ["ragged"] * LAYERS
    runs.clear()
    _, _, kernels, operations = prefill(backend, gpu, [0, 9, 9], [40, 300, 3], requests)
    assert kernels == ["_block_table"] * LAYERS
    assert operations == {"sub": LAYERS, "reshape": LAYERS, "flatten": 2 * LAYERS}
    assert runs == ["ragged", "paged", "merge"] * LAYERS


def test_a_scored_prompt_costs_others_one_launch(backend, gpu, runs):
    """A layer's: the log-sum-exp of all queries is of base 2."""
    scored = prefilled({"rate": 4, "policy": "kv-compress"})
    found = prefill(backend, gpu, [0, 0], [N, 3], [scored, request()])
    assert found[2].count("_extend") == 0
    assert found[3]["mul"] == LAYERS
    assert runs == ["ragged"] * LAYERS
