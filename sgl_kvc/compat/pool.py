"""The KV pool and what is computed with it: ours is used, and nobody writes past it."""

from __future__ import annotations

from typing import Any

import torch

from sgl_kvc.compat import BACKEND, serving_with_kvc
from sgl_kvc.compat.hook import Hook


def register_backends() -> None:
    """SGLang's public seams: the names of our attention backend and radix cache."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.server_args import add_attention_backend_choices

    @register_attention_backend(BACKEND)
    def attention_backend(runner):
        from sgl_kvc.attention.select import create

        return create(runner)

    def radix_cache(context):
        from sgl_kvc.cache.radix import CompressingRadixCache

        return CompressingRadixCache(context.params)

    add_attention_backend_choices([BACKEND])
    register_radix_cache_backend(BACKEND, radix_cache)


def use_arena(configurator, **kwargs: Any) -> tuple[tuple, dict]:
    """``KVCacheConfigurator._build_mha_kv_pool``: our pool on CUDA.

    What ``--kv-cache-dtype auto`` is, is known only here: a checkpoint may ask for fp8.
    """
    from sgl_kvc.attention.support import check_device
    from sgl_kvc.pool.arena import ArenaKVPool

    if serving_with_kvc():
        e4m3 = configurator.kv_cache_dtype == torch.float8_e4m3fn
        capability = torch.cuda.get_device_capability()
        check_device(configurator.model_config, "fp8_e4m3" if e4m3 else "auto", capability)
        kwargs["mha_pool_class"] = ArenaKVPool
    return (configurator,), kwargs


def never_fuse_store(original, forward_batch) -> bool:
    """``enable_fused_set_kv_buffer``: models must not write past the pool."""
    return not serving_with_kvc() and original(forward_batch)


def eager_while_compressed(original, runner, forward_batch) -> bool:
    """``PrefillCudaGraphRunner.can_run_graph``: not if anything is scored or reads a segment."""
    known = getattr(runner.model_runner.token_to_kv_pool, "requests", None) or {}
    for rid in forward_batch.rids or ():
        request = known.get(rid)
        if request is not None and (request.scores is not None or request.segment is not None):
            return False
    return original(runner, forward_batch)


def support_triton(original, backend: str) -> bool:
    """``support_triton``: there is no Triton on a CPU."""
    return torch.cuda.is_available() and original(backend)


HOOKS = (
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
        "BEFORE",
        use_arena,
        "only out-of-tree platforms may name a pool",
    ),
    Hook(
        "sglang.srt.utils.common.support_triton",
        "AROUND",
        support_triton,
        "the CPU platform has no Triton, and upstream asks only for the backend's name",
    ),
    Hook(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
        "AROUND",
        never_fuse_store,
        "some models write bf16 KVs into get_key_buffer() themselves, as [slots, H, D]",
        gpu=True,
    ),
    Hook(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
        ".PrefillCudaGraphRunner.can_run_graph",
        "AROUND",
        eager_while_compressed,
        "prompts are scored between layers, and heads of a segment differ in length",
        gpu=True,
    ),
)
