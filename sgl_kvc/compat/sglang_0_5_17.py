"""SGLang 0.5.17: the hooks, and the reason for each."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from sgl_kvc import report
from sgl_kvc.compat import Hook, cpu, http, operations, requests
from sgl_kvc.spec import CUSTOM_PARAM

logger = logging.getLogger(__name__)

BACKEND = "kvc"


def default_arguments(args, *_: Any) -> None:
    """``ServerArgs.__post_init__``: what ``--attention-backend kvc`` implies."""
    if args.attention_backend == BACKEND:
        if args.radix_cache_backend is None:
            args.radix_cache_backend = BACKEND
        if args.page_size is None:
            args.page_size = 16
        if args.cuda_graph_backend_prefill is None:
            args.cuda_graph_backend_prefill = "disabled"  # prompts are scored between layers


def add_arguments(_result: Any, parser) -> None:
    """``ServerArgs.add_cli_args``: our own options."""
    from sgl_kvc.attention.select import CHOICES

    parser.add_argument(
        "--kvc-decode",
        choices=CHOICES,
        help="who computes decode of --attention-backend kvc (docs/gpu.md)",
    )


def take_arguments(_cls, args) -> None:
    """``ServerArgs.from_cli_args``: they travel to SGLang's processes in the environment."""
    from sgl_kvc.attention.select import VARIABLE

    if getattr(args, "kvc_decode", None):
        os.environ[VARIABLE] = args.kvc_decode


def never_fuse_store(original, forward_batch) -> bool:
    """``enable_fused_set_kv_buffer``: models must not write past the pool."""
    from sgl_kvc.compat import serving_with_kvc

    return not serving_with_kvc() and original(forward_batch)


def eager_while_counting(original, runner, forward_batch) -> bool:
    """``DecodeCudaGraphRunner.can_run_graph``: captured steps do not add to the metric."""
    segments = getattr(runner.model_runner.token_to_kv_pool, "segments", None)
    if segments is not None and segments.counts():
        return False
    return original(runner, forward_batch)


def check_support(scheduler) -> None:
    """``Scheduler.init_model_worker``: before weights are loaded and pools are built."""
    if scheduler.server_args.attention_backend != BACKEND:
        return
    from sgl_kvc.attention.support import UnsupportedError, check_model, check_server

    try:
        check_model(scheduler.model_config)
        check_server(scheduler.server_args)
    except UnsupportedError as error:
        logger.critical("sgl-kvc cannot serve this: %s", error)
        raise


def plan_requests(_result: Any, batch) -> None:
    """``ScheduleBatch.prepare_for_extend``: the rows of the batch are known from here on."""
    plan = getattr(batch.tree_cache, "plan_request", None)
    if plan is not None:
        for req in batch.reqs:
            plan(req)
        batch.tree_cache.pool.prefilling = [req.req_pool_idx for req in batch.reqs]


def compress_due(batch) -> None:
    """``ScheduleBatch.prepare_for_decode``: every KV of the batch is stored or on its way.

    With overlap, SGLang prepares the first decode step before it looks at the prefill's result.
    A request is compressed here then, so that what this step reads does not depend on timing.
    """
    due = getattr(batch.tree_cache, "compress_due", None)
    if due is not None:
        for req in batch.reqs:
            due(req)


def stop_before_question(original, adder, req, **kwargs: Any) -> Any:
    """``PrefillAdder.add_one_req``, ``.add_chunked_req``: a chunk ends where the question begins.

    The request is compressed there, and the next chunk reads the question over what is left.
    Only one request of a batch may be cut (SGLang keeps one `chunked_req`), so another that
    would be has to wait for the next batch.
    """
    room = getattr(adder.tree_cache, "room_before_question", lambda _req: None)(req)
    first_chunk = "has_chunked_req" in kwargs  # add_one_req is told whether one is cut already
    limit = adder.rem_chunk_tokens
    if first_chunk and (kwargs["has_chunked_req"] or adder.new_chunked_req is not None):
        tokens = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        if room is not None or (limit is not None and adder.ceil_paged_tokens(tokens) > limit):
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.OTHER
    if room is None or (limit is not None and limit <= room):
        return original(adder, req, **kwargs)
    adder.rem_chunk_tokens, added = room, len(adder.can_run_list)
    try:
        result = original(adder, req, **kwargs)
    finally:
        used = room - adder.rem_chunk_tokens
        adder.rem_chunk_tokens = None if limit is None else limit - used
    return adder.budget_state() if first_chunk and len(adder.can_run_list) > added else result


def admit_more(_result: Any, scheduler, *_args: Any) -> None:
    """``Scheduler.process_batch_result``: compression made room, so the batch is not full.

    SGLang looks at the waiting queue again only once a request has left the batch.
    """
    if getattr(scheduler.tree_cache, "take_released", bool)():
        scheduler.running_batch.batch_is_full = False


def attach_report(_accumulator, *, req) -> None:
    """``_GenerationStreamAccumulator.accept``: the report rides on the last output token.

    SGLang carries ``customized_info`` as one value per output token.
    """
    if getattr(req, "kvc_report", None) is None:
        return
    if req.customized_info is None:
        req.customized_info = {}
    values = req.customized_info.setdefault(CUSTOM_PARAM, [])
    values.extend([None] * (len(req.output_ids_through_stop) - len(values)))
    if req.finished() and values:
        values[-1] = report.of(req)


def use_arena(_configurator, **kwargs: Any) -> tuple[tuple, dict]:
    """``KVCacheConfigurator._build_mha_kv_pool``: our pool on CUDA."""
    from sgl_kvc.compat import serving_with_kvc
    from sgl_kvc.pool.arena import ArenaKVPool

    if serving_with_kvc():
        kwargs["mha_pool_class"] = ArenaKVPool
    return (_configurator,), kwargs


def check_scheduler(_result: Any, scheduler, *_args: Any, **_kwargs: Any) -> None:
    """``Scheduler.__init__``: every seam was taken, or the process stops.

    SGLang logs and swallows what a plugin raises, and would serve uncompressed.
    """
    if scheduler.server_args.attention_backend != BACKEND:
        return
    from sgl_kvc.cache.radix import CompressingRadixCache
    from sgl_kvc.pool.arena import ArenaKVPool

    cache = scheduler.tree_cache
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    for seam, found, wanted in (
        ("radix cache", cache, CompressingRadixCache),
        ("KV pool", pool, ArenaKVPool),
    ):
        if not isinstance(found, wanted):
            raise RuntimeError(
                f"sgl-kvc: SGLang's {seam} is {type(found).__name__}, not {wanted.__name__}; "
                "refusing to serve"
            )
    if scheduler.enable_overlap and torch.cuda.is_available():
        cache.stream = scheduler.forward_stream
    logger.info("arena, radix cache and attention backend of sgl-kvc are in place")


def support_triton(original, backend: str) -> bool:
    """``support_triton``: there is no Triton on a CPU."""
    return torch.cuda.is_available() and original(backend)


HOOKS = [
    Hook(
        "sglang.srt.server_args.ServerArgs.__post_init__",
        "BEFORE",
        default_arguments,
        "one flag chooses attention backend, radix cache and a block size",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.init_model_worker",
        "BEFORE",
        check_support,
        "what cannot be compressed must be refused before it is half built",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        "AFTER",
        plan_requests,
        "the attention backend sees rows, not requests",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
        "BEFORE",
        compress_due,
        "compression after prefill must not miss the first step, and that in decode has its times",
    ),
    *(
        Hook(
            f"sglang.srt.managers.schedule_policy.PrefillAdder.{method}",
            "AROUND",
            stop_before_question,
            "chunks are cut by budget alone, and a question apart is read after compression",
        )
        for method in ("add_one_req", "add_chunked_req")
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        "AFTER",
        admit_more,
        "a full batch stays closed until a request leaves it",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.output_streamer"
        "._GenerationStreamAccumulator.accept",
        "BEFORE",
        attach_report,
        "customized_info is otherwise filled by the model's output only",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        "AFTER",
        check_scheduler,
        "plugin errors are swallowed upstream",
    ),
    Hook(
        "sglang.srt.utils.common.support_triton",
        "AROUND",
        support_triton,
        "the CPU platform has no Triton, and upstream asks only for the backend's name",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
        "BEFORE",
        use_arena,
        "only out-of-tree platforms may name a pool",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "AFTER",
        add_arguments,
        "upstream has no place for a plugin's options",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "BEFORE",
        take_arguments,
        "upstream has no place for a plugin's options",
    ),
    *http.HOOKS,
]

#: Taken where there is a GPU: importing what they name costs seconds.
GPU_HOOKS = [
    Hook(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
        "AROUND",
        never_fuse_store,
        "some models write bf16 KVs into get_key_buffer() themselves, as [slots, H, D]",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
        ".DecodeCudaGraphRunner.can_run_graph",
        "AROUND",
        eager_while_counting,
        "compression that goes on in decode needs another pass over the keys",
    ),
]


def hooks() -> list[Hook]:
    """Those that this machine needs."""
    always = HOOKS + requests.HOOKS + operations.HOOKS
    return always + (GPU_HOOKS if torch.cuda.is_available() else cpu.HOOKS)


def register() -> None:
    """Register backends and hooks with SGLang. Raises what the caller must not swallow."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
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
    for hook in hooks():
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
