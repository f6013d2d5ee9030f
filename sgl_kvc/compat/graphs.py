"""Decode in CUDA graphs: batches as large as compression makes them, and the memory for it."""

from __future__ import annotations

import os
from typing import Any

import torch

from sgl_kvc.compat import BACKEND, serving_with_kvc
from sgl_kvc.compat.hook import Hook

#: Decode is captured for so many times the requests of SGLang's own default, and for no more than
#: that: compression makes room for more requests, up to as many times as its rate.
_TIMES, _MOST = 4, 1024
#: The variant of a captured step that adds to the metric, beside SGLang's own ("lora").
_WITH_METRIC = "metric"


def larger_batches(original, args, max_bs: int) -> list[int]:
    """``ServerArgs._generate_decode_cuda_graph_batch_sizes``: up to 1,024 requests.

    SGLang's default is 256 on an H100. What the operator gave (``--cuda-graph-max-bs-decode``,
    ``--cuda-graph-bs-decode``, ``--cuda-graph-config``) stays, and so does what would be captured
    one by one (``--disable-cuda-graph-padding``). SGLang's ``mem_fraction_static`` is
    computed afterwards, from the larger number.
    """
    given = ("decode", "max_bs") in args._cuda_graph_config_locked
    padded = not args.disable_cuda_graph_padding
    if args.attention_backend == BACKEND and padded and not given:
        most = min(_TIMES * max_bs, _MOST, args.max_running_requests or _MOST, _addressable(args))
        max_bs = max(max_bs, most)
        args.cuda_graph_config.decode.max_bs = max_bs
    return original(args, max_bs)


def _addressable(args) -> int:
    """Requests that the chosen decode kernel can address."""
    from kvc_kernels.gpu.decode_buffers import most_requests

    from sgl_kvc.attention.select import VARIABLE

    config = args.get_model_config()
    heads = config.get_num_kv_heads(args.tp_size)
    tokens = config.context_len + 2 * (args.page_size or 1)  # rows are a little longer
    chosen = os.environ.get(VARIABLE, "auto")
    return most_requests("fa2" if chosen == "auto" else chosen, heads, tokens)


def without_decode_buffers(original, configurator, pre_model_load_memory: int) -> int:
    """``KVCacheConfigurator._profile_available_bytes``: decode's buffers come after the pool."""
    available = original(configurator, pre_model_load_memory)
    if not serving_with_kvc():
        return available
    from kvc_kernels.gpu.decode_buffers import decode_bytes

    from sgl_kvc.attention.select import decode_kernel

    args, config = configurator.server_args, configurator.model_config
    decode, ranks = args.cuda_graph_config.decode, configurator.ps.attn_tp_size
    if decode.backend == "disabled":
        return available
    requests = max(decode.bs)
    if args.max_running_requests:
        requests = min(requests, args.max_running_requests)
    heads = config.get_num_kv_heads(ranks)
    return available - decode_bytes(
        decode_kernel(),
        requests=requests,
        layers=configurator.layer_info.num_effective_layers,
        heads=heads,
        group=config.get_num_attention_heads(ranks) // heads,
        head_dim=config.head_dim,
        page_size=configurator.page_size,
        tokens=config.context_len + configurator.page_size,
        processors=torch.cuda.get_device_properties(configurator.gpu_id).multi_processor_count,
    )


def count_metric(original, sizes, configurator, num_layers: int) -> int:
    """``DefaultPoolConfigurator._compute_cell_size``: bytes of a token, its metric included."""
    from sgl_kvc.pool.metric import BYTES, made_at_start

    size = original(sizes, configurator, num_layers)
    if serving_with_kvc() and made_at_start():
        heads = configurator.model_config.get_num_kv_heads(configurator.ps.attn_tp_size)
        size += BYTES * heads * num_layers
    return size


def _pool_of(runner) -> Any:
    """The runner's pool if it is ours and decode adds to its metric now; else None."""
    pool = runner.model_runner.token_to_kv_pool
    spans = getattr(pool, "spans", None)
    return pool if spans is not None and spans.tracks_attention() else None


def can_run_graph(original, runner, forward_batch) -> bool:
    """``DecodeCudaGraphRunner.can_run_graph``: not with a metric that no captured step adds to."""
    pool = _pool_of(runner)
    if pool is not None and not pool.metric_at_start:
        return False
    return original(runner, forward_batch)


def variant_of(original, runner, forward_batch) -> str | None:
    """``DecodeCudaGraphRunner._resolve_lora_variant``: which captured step a batch takes."""
    label = original(runner, forward_batch)
    return label if _pool_of(runner) is None else _with_metric(label)


def capture_twice(
    original, runner, size: int, forward, stream_idx=None, variant_label=None
) -> None:
    """``DecodeCudaGraphRunner.capture_one_shape``: a step also as it adds to the metric.

    Batches in which nobody compresses in decode replay a step without the second pass.
    """
    original(runner, size, forward, stream_idx, variant_label)
    pool = runner.model_runner.token_to_kv_pool
    if getattr(pool, "metric_at_start", False):
        with pool.spans.tracking_whatever_is():
            original(runner, size, forward, stream_idx, _with_metric(variant_label))


def _with_metric(label: str | None) -> str:
    return _WITH_METRIC if label is None else f"{label} {_WITH_METRIC}"


_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"

HOOKS = (
    Hook(
        "sglang.srt.server_args.ServerArgs._generate_decode_cuda_graph_batch_sizes",
        "AROUND",
        larger_batches,
        "compression is for large batches, and only here is known what the operator left open",
        gpu=True,
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        "AROUND",
        without_decode_buffers,
        "SGLang sizes the pool before attention backends make their buffers",
        gpu=True,
    ),
    Hook(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "AROUND",
        count_metric,
        "a pool cannot say what one of its tokens takes",
        gpu=True,
    ),
    Hook(
        f"{_RUNNER}.can_run_graph",
        "AROUND",
        can_run_graph,
        "without memory for the metric, compression in decode runs eagerly",
        gpu=True,
    ),
    Hook(
        f"{_RUNNER}._resolve_lora_variant",
        "AROUND",
        variant_of,
        "captured steps have variants for LoRA alone",
        gpu=True,
    ),
    Hook(
        f"{_RUNNER}.capture_one_shape",
        "AROUND",
        capture_twice,
        "captured steps have variants for LoRA alone",
        gpu=True,
    ),
)
