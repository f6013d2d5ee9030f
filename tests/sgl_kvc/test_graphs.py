"""Decode in CUDA graphs: which step a batch replays, and what one with a metric does.

There is no GPU: what is captured is called, after all that changes between a capture and a replay
has changed.
"""

from __future__ import annotations

import argparse
import functools
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner.shape_key import ShapeKey

from sgl_kvc.attention.backend import KvcAttentionBackend
from sgl_kvc.attention.flashinfer_backend import FlashInferAttentionBackend
from sgl_kvc.compat import arguments, graphs
from sgl_kvc.pool.metric import VARIABLE, made_at_start
from tests.sgl_kvc import fake_gpu
from tests.sgl_kvc.runners import DIM, GROUP, HEADS, LAYER, PAGE, batch, compress

WIDTHS = (HEADS * GROUP * DIM, HEADS * DIM, HEADS * DIM)
LENS = {1: (81, 1), 2: (32, 1)}


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


def test_sglang_finds_a_step_by_its_variant(gpu_pool, gpu_rows, monkeypatch):
    """Its own `can_run_graph`, of a runner that has captured nothing but what is listed."""
    gpu_pool.bind(gpu_rows)
    captured = [ShapeKey(4)]
    for name, hook in (
        ("_resolve_lora_variant", graphs.variant_of), ("can_run_graph", graphs.can_run_graph),
    ):  # fmt: skip
        hooked = functools.partial(hook, getattr(DecodeCudaGraphRunner, name))
        monkeypatch.setattr(DecodeCudaGraphRunner, name, functools.partialmethod(_call, hooked))
    off = ("ragged_verify_mode require_mlp_tp_gather enable_pdmux require_mlp_sync "
           "is_encoder_decoder enable_two_batch_overlap")  # fmt: skip
    runner = object.__new__(DecodeCudaGraphRunner)
    vars(runner).update(dict.fromkeys(off.split(), False), disable_padding=True)
    runner.backend = SimpleNamespace(can_run=lambda _, key: key in captured)
    algorithm = SimpleNamespace(is_ngram=lambda: False)
    runner.model_runner = SimpleNamespace(token_to_kv_pool=gpu_pool, spec_algorithm=algorithm)
    four = SimpleNamespace(replace_embeds=None, spec_info=None, batch_size=4)
    assert runner.can_run_graph(four)
    gpu_pool.spans.track(1, 2)
    assert not runner.can_run_graph(four)
    captured.append(ShapeKey(4, None, "metric"))
    assert runner.can_run_graph(four)


def _call(runner, hooked, *arguments):
    """As SGLang calls what a hook is around."""
    return hooked(runner, *arguments)


def test_the_option_travels_to_sglangs_processes(monkeypatch):
    parser = argparse.ArgumentParser()
    arguments.add_arguments(None, parser)
    monkeypatch.delenv(VARIABLE, raising=False)
    arguments.take_arguments(None, parser.parse_args([]))
    assert made_at_start()
    monkeypatch.setenv(VARIABLE, "on")  # put back afterwards
    arguments.take_arguments(None, parser.parse_args(["--kvc-recompress", "off"]))
    assert not made_at_start()


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
