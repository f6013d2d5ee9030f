"""Decode in CUDA graphs: for how many requests, and the memory that is set aside for it."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from kvc_kernels.gpu.decode_buffers import decode_bytes
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.server_args import ServerArgs

from sgl_kvc.compat import graphs
from sgl_kvc.pool.metric import VARIABLE
from tests import tiny_models

SIZES = ServerArgs._generate_decode_cuda_graph_batch_sizes


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_models.write(tmp_path_factory.mktemp("llama")))


def parsed(model: str, backend: str = "kvc", **options) -> ServerArgs:
    """Arguments as they are when SGLang has read what the operator said of graphs."""
    args = ServerArgs(model_path=model, device="cpu", attention_backend=backend, **options)
    args._declarations_materialized = False  # they may be resolved again
    args.cuda_graph_config = None
    args._parse_cuda_graph_config()
    return args


def resolved(model: str, gpu_mib: int, monkeypatch, **options) -> ServerArgs:
    """Arguments after SGLang has sized what depends on a GPU's memory, which is not there."""
    args, original = parsed(model, **options), SIZES
    with monkeypatch.context() as patch:
        patch.setattr(
            ServerArgs, original.__name__, lambda *given: graphs.larger_batches(original, *given)
        )
        args.device, args.mem_fraction_static, args.chunked_prefill_size = "cuda", None, None
        args._handle_gpu_memory_settings(gpu_mib)
    return args


@pytest.mark.parametrize(
    ("gpu_gib", "options", "most"),
    [
        (80, {}, 1024),
        (140, {"tp_size": 4}, 1024),
        (24, {}, 96),
        (80, {"cuda_graph_max_bs_decode": 64}, 64),
        (80, {"cuda_graph_max_bs_decode": 256}, 256),
        (80, {"cuda_graph_bs_decode": [1, 2, 300]}, 300),
        (80, {"max_running_requests": 600}, 600),
        (80, {"max_running_requests": 100}, 256),  # SGLang's own
        (80, {"disable_cuda_graph_padding": True}, 256),
    ],
    ids=str,
)
def test_decode_is_captured_for_large_batches_unless_the_operator_says_otherwise(
    model, monkeypatch, gpu_gib, options, most
):
    args = resolved(model, gpu_gib << 10, monkeypatch, **options)
    decode = args.cuda_graph_config.decode
    assert decode.max_bs == max(decode.bs) == most


def test_another_attention_backend_keeps_sglangs_sizes(model):
    assert max(graphs.larger_batches(SIZES, parsed(model, "torch_native"), 256)) == 256


def test_sglang_leaves_memory_for_larger_graphs(model, monkeypatch):
    """Of 80 GiB what it reckons for 768 more requests, 2 MiB each."""
    of_1024 = resolved(model, 80 << 10, monkeypatch)
    of_256 = resolved(model, 80 << 10, monkeypatch, cuda_graph_max_bs_decode=256)
    less = of_256.mem_fraction_static - of_1024.mem_fraction_static
    assert less == pytest.approx(768 * 2 / (80 << 10), abs=0.0011)


def test_fa2_counts_tokens_in_32_bits(model, monkeypatch):
    """4 heads of two million tokens: no more requests than it can tell apart."""
    context = {"max_position_embeddings": 1 << 21}
    args = parsed(model, context_length=1 << 21, json_model_override_args=json.dumps(context))
    for kernel, most in (("triton", 1024), ("fa2", 511), ("auto", 511)):
        monkeypatch.setenv("SGL_KVC_DECODE", kernel)
        assert max(graphs.larger_batches(SIZES, args, 256)) == most


@pytest.fixture
def configurator(model, monkeypatch) -> SimpleNamespace:
    """What SGLang sizes a pool from, on an H100 that is not there."""
    monkeypatch.setattr(graphs, "serving_with_kvc", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    return SimpleNamespace(
        server_args=resolved(model, 80 << 10, monkeypatch),
        model_config=ModelConfig(model),
        layer_info=SimpleNamespace(num_effective_layers=4),
        ps=SimpleNamespace(attn_tp_size=1),
        page_size=16,
        gpu_id=0,
    )


@pytest.mark.parametrize("kernel", ["auto", "fa2"])
def test_the_pool_leaves_room_for_decode(configurator, monkeypatch, kernel):
    monkeypatch.setenv("SGL_KVC_DECODE", kernel)
    left = graphs.without_decode_buffers(lambda *_: 10 << 30, configurator, 0)
    expected = decode_bytes(
        "triton" if kernel == "auto" else kernel, requests=1024, layers=4, heads=4, group=2,
        head_dim=32, page_size=16, tokens=tiny_models.CONTEXT + 16, processors=132,
    )  # fmt: skip
    assert (10 << 30) - left == expected
    configurator.server_args.max_running_requests = 64
    assert graphs.without_decode_buffers(lambda *_: 10 << 30, configurator, 0) > left
    configurator.server_args.cuda_graph_config.decode.backend = "disabled"
    assert graphs.without_decode_buffers(lambda *_: 10 << 30, configurator, 0) == 10 << 30


def test_a_token_takes_its_metric_too(configurator, monkeypatch):
    """Four bytes of every head and layer, beside its keys and values."""
    configurator.kv_cache_dtype_str, configurator.use_mla_backend = "auto", False
    kvs = 2 * 4 * 32 * 2 * 4
    count = functools.partial(graphs.count_metric, lambda *_: kvs, DefaultPoolConfigurator)
    assert count(configurator, 4) == kvs + 4 * 4 * 4
    monkeypatch.setenv(VARIABLE, "off")
    assert count(configurator, 4) == kvs
