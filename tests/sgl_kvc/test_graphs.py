"""Decode in CUDA graphs: how many requests, the metric in captured steps, the memory for both.

There is no GPU: what is captured is called, after all that changes between a capture and a replay
has changed.
"""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from kvc_kernels.gpu.decode_buffers import decode_bytes
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.server_args import ServerArgs

from sgl_kvc.attention.backend import KvcAttentionBackend
from sgl_kvc.attention.flashinfer_backend import FlashInferAttentionBackend
from sgl_kvc.compat import graphs
from sgl_kvc.pool.metric import VARIABLE
from tests import tiny_models
from tests.sgl_kvc import fake_gpu
from tests.sgl_kvc.test_flashinfer_backend import (
    DIM,
    GROUP,
    HEADS,
    LAYER,
    PAGE,
    batch,
    compress,
    runner,
)

__all__ = ["runner"]  # a fixture
WIDTHS = (HEADS * GROUP * DIM, HEADS * DIM, HEADS * DIM)
LENS = {1: (81, 1), 2: (32, 1)}
SIZES = ServerArgs._generate_decode_cuda_graph_batch_sizes


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_models.write(tmp_path_factory.mktemp("llama")))


# ------------------------------------------------------------------------------ how many requests


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


# ------------------------------------------------------------------- what decides is read: no GPU


def decide(pool, captured: list) -> tuple[bool, str | None]:
    """Whether a batch replays a captured step, and of which variant."""
    of = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool))
    label = graphs.variant_of(lambda *_: None, of, None)
    found = graphs.can_run_graph(lambda *_: ShapeKey(4, None, label) in captured, of, None)
    return found, label


def capture(pool) -> tuple[list[ShapeKey], list[bool]]:
    """The steps of a batch size that are captured, and whether each adds to the metric."""
    keys, adds = [], []
    of = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool))

    def original(_runner, size, _forward, stream, label):
        keys.append(ShapeKey(size, stream, label))
        adds.append(pool.spans.tracks_attention())

    graphs.capture_twice(original, of, 4, None)
    return keys, adds


def test_a_step_with_the_metric_is_captured_and_replayed(gpu_pool, gpu_rows):
    gpu_pool.bind(gpu_rows)
    assert "metric" in vars(gpu_pool), "made with the pool"
    keys, adds = capture(gpu_pool)
    assert adds == [False, True]
    assert decide(gpu_pool, keys) == (True, None)
    gpu_pool.spans.track(1, 2)
    assert decide(gpu_pool, keys) == (True, "metric")
    gpu_pool.spans.clear(1)
    assert decide(gpu_pool, keys) == (True, None)


def test_without_memory_for_the_metric_such_a_batch_runs_eagerly(gpu, monkeypatch, gpu_rows):
    monkeypatch.setenv(VARIABLE, "off")
    pool = fake_gpu.make_pool()
    pool.bind(gpu_rows)
    assert "metric" not in vars(pool)
    keys, adds = capture(pool)
    assert adds == [False]
    pool.spans.track(1, 2)
    assert decide(pool, keys)[0] is False
    assert decide(SimpleNamespace(), keys) == (True, None), "another's pool"


def test_variants_of_lora_stay_apart():
    pool = SimpleNamespace(spans=SimpleNamespace(tracks_attention=lambda: True))
    of = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool))
    labels = [graphs.variant_of(lambda *_, each=each: each, of, None) for each in ("lora", None)]
    assert labels == ["lora metric", "metric"]


# ----------------------------------------------------------------------- what a captured step does


def step(backend, given, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    new = len(given.out_cache_loc)
    q, k, v = (torch.randn(new, width).to(backend.cache.arena_k) for width in WIDTHS)
    layer = RadixAttention(HEADS * GROUP, DIM, DIM**-0.5, num_kv_heads=HEADS, layer_id=LAYER)
    return backend.forward_decode(q, k, v, layer, given)


def tracked_batch(backend) -> SimpleNamespace:
    """One of two requests is compressed, and compresses again."""
    compress(backend, 1)
    backend.spans.track(1, 2)
    torch.manual_seed(0)
    backend.pool.metric.uniform_()
    return batch(backend, ForwardMode.DECODE, LENS)


@pytest.mark.parametrize("kernels", ["triton", "fa2"])
def test_a_captured_step_adds_what_an_eager_one_does(runner, kernels):
    """Rows, spans, lengths and who is tracked may change before it runs."""
    eager = KvcAttentionBackend(runner)
    given = tracked_batch(eager)
    before = eager.pool.metric.clone()
    eager.init_forward_metadata(given)
    expected, wanted = step(eager, given), eager.pool.metric.clone()
    assert not torch.equal(wanted, before)

    runner.token_to_kv_pool.metric_at_start = True
    if kernels == "triton":
        backend = KvcAttentionBackend(runner)
    else:
        backend = FlashInferAttentionBackend(runner, kernels)
    given = tracked_batch(backend)
    assert torch.equal(backend.pool.metric, before)
    backend.init_cuda_graph_state(4, 4)
    backend.init_forward_metadata_out_graph(given)
    backend.spans.reset()
    backend.req_to_token.zero_()
    given.seq_lens.zero_()
    with backend.spans.tracking_whatever_is():
        got = step(backend, given)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(backend.pool.metric, wanted, atol=1e-5, rtol=1e-5)


def test_a_captured_step_adds_nothing_where_nobody_is_tracked(runner):
    """But begins new KVs at zero."""
    backend = KvcAttentionBackend(runner)
    backend.init_cuda_graph_state(4, 4)
    given = batch(backend, ForwardMode.DECODE, LENS)
    expected = backend.pool.metric.uniform_().clone()
    slots = given.out_cache_loc
    expected[slots // PAGE, LAYER, :, slots % PAGE] = 0
    with backend.spans.tracking_whatever_is():
        backend.init_forward_metadata_out_graph(given, in_capture=True)
        step(backend, given)
    assert torch.equal(backend.pool.metric, expected)


def test_a_step_without_the_metric_leaves_it_alone(runner):
    backend = KvcAttentionBackend(runner)
    backend.init_cuda_graph_state(4, 4)
    given = batch(backend, ForwardMode.DECODE, LENS)
    backend.init_forward_metadata_out_graph(given, in_capture=True)
    step(backend, given)
    assert "metric" not in vars(backend.pool)


# ----------------------------------------------------------------------------------------- memory


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
