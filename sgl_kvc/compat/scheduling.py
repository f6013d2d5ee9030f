"""The scheduler: when prompts are scored, cut, compressed and reported."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from sgl_kvc.compat import BACKEND
from sgl_kvc.compat.bounded import counted
from sgl_kvc.compat.hook import Hook
from sgl_kvc.compat.segments import make_way
from sgl_kvc.spec import CUSTOM_PARAM

logger = logging.getLogger(__name__)


def check_support(scheduler) -> None:
    """``Scheduler.init_model_worker``: before weights are loaded and pools are built."""
    args, config = scheduler.server_args, scheduler.model_config
    if BACKEND not in (args.attention_backend, *args.get_attention_backends()):
        return
    from sgl_kvc.attention.support import (
        UnsupportedError,
        check_device,
        check_model,
        check_server,
    )

    gpu = torch.cuda.is_available() and args.device == "cuda"
    try:
        check_model(config)
        check_server(args)
        check_device(
            config, args.kv_cache_dtype, torch.cuda.get_device_capability() if gpu else None
        )
    except UnsupportedError as error:
        logger.critical("sgl-kvc cannot serve this: %s", error)
        raise


def begin_prefill(_result: Any, batch) -> None:
    """``ScheduleBatch.prepare_for_extend``: the rows of the batch are known from here on."""
    begin = getattr(batch.tree_cache, "begin_prefill", None)
    if begin is not None:
        for req in batch.reqs:
            begin(req)


def compress_due(batch) -> None:
    """``ScheduleBatch.prepare_for_decode``: every KV of the batch is stored or on its way.

    With overlap, SGLang prepares the first decode step before it looks at the prefill's result.
    A request is compressed here then, so that what this step reads does not depend on timing.
    SGLang has made sure before that the step's new blocks can be had, and does not look again.
    """
    due = getattr(batch.tree_cache, "compress_due", None)
    if due is not None:
        due(batch.reqs, promised=batch.new_tokens_required_next_decode())


def relieve_decode(original, batch, selected_indices=None) -> bool:
    """``ScheduleBatch.check_decode_mem``: compress who allows it before anybody is retracted."""
    relieve = getattr(batch.tree_cache, "relieve", None)
    if relieve is not None and selected_indices is None:
        relieve(batch.reqs, batch.new_tokens_required_next_decode())
    return original(batch, selected_indices)


def let_in(result: Any, scheduler, *_args: Any, **_kwargs: Any) -> None:
    """``Scheduler._get_new_batch_prefill_raw``: where nobody who waits could enter, make room.

    Requests that allow it are compressed, one in every step. Where nothing runs, what is pinned
    gives way.
    """
    batch, running = result
    cache = scheduler.tree_cache
    if batch is not None or not scheduler.waiting_queue or not hasattr(cache, "relieve"):
        return
    if not running.is_empty():
        free_rows = scheduler.get_num_allocatable_reqs(running.batch_size())
        promised = running.new_tokens_required_next_decode()
        if free_rows > 0 and cache.relieve(running.reqs, promised, once=True):
            running.batch_is_full = False
    elif scheduler.chunked_req is None:
        make_way(running, cache)


@contextlib.contextmanager
def reserved(adder, req) -> Iterator[None]:
    """While `req` is added to a batch: what compressing on pressure takes is set aside.

    Else who is let in may fill the pool, and nobody could be compressed any more. Who would be
    alone is let in whatever its own copy takes.
    """
    if not hasattr(adder.tree_cache, "relieve"):
        yield
        return
    from sgl_kvc.cache.timing import reserved_tokens

    running = adder.running_batch.reqs if adder.running_batch is not None else []
    known, own = getattr(adder, "kvc_reserved", None), reserved_tokens(adder.tree_cache, [req])
    if known is None:
        known = reserved_tokens(adder.tree_cache, running)
    added = len(adder.can_run_list)
    tokens = max(known, own) if running or added else 0
    adder.rem_total_token_offset += tokens
    try:
        yield
    finally:
        adder.rem_total_token_offset -= tokens
        adder.kvc_reserved = max(known, own) if len(adder.can_run_list) > added else known


def stop_at_cut(original, adder, req, **kwargs: Any) -> Any:
    """``PrefillAdder.add_one_req``, ``.add_chunked_req``: a chunk ends where compression is due.

    The request is compressed there, and the next chunk reads the question over what is left.
    Only one request of a batch may be cut (SGLang keeps one `chunked_req`), so another that
    would be has to wait for the next batch.
    """
    room = getattr(adder.tree_cache, "room_before_cut", lambda _req: None)(req)
    first_chunk = "has_chunked_req" in kwargs  # add_one_req is told whether one is cut already
    set_aside = reserved(adder, req) if first_chunk else contextlib.nullcontext()
    limit = adder.rem_chunk_tokens
    rest = adder.ceil_paged_tokens(len(req.full_untruncated_fill_ids) - len(req.prefix_indices))
    would_be_cut = room is not None or (limit is not None and rest > limit)
    if first_chunk and would_be_cut and (kwargs["has_chunked_req"] or adder.new_chunked_req):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.OTHER
    if room is None and limit is None and not first_chunk:
        room = rest  # SGLang goes on with a cut request by a limit alone
    if room is None or (limit is not None and limit <= room):
        with counted(adder, req), set_aside:
            return original(adder, req, **kwargs)
    adder.rem_chunk_tokens, added = room, len(adder.can_run_list)
    try:
        with counted(adder, req), set_aside:
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
    request = getattr(req, "kvc", None)
    if request is None or request.report is None:
        return
    if req.customized_info is None:
        req.customized_info = {}
    values = req.customized_info.setdefault(CUSTOM_PARAM, [])
    values.extend([None] * (len(req.output_ids_through_stop) - len(values)))
    if req.finished() and values:
        values[-1] = request.report.to_json()


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


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"

HOOKS = (
    Hook(
        f"{_SCHEDULER}.init_model_worker",
        "BEFORE",
        check_support,
        "what cannot be compressed must be refused before it is half built",
    ),
    Hook(
        f"{_BATCH}.prepare_for_extend",
        "AFTER",
        begin_prefill,
        "the attention backend sees rows, not requests",
    ),
    Hook(
        f"{_BATCH}.prepare_for_decode",
        "BEFORE",
        compress_due,
        "compression after prefill must not miss the first step, and that in decode has its times",
    ),
    Hook(
        f"{_BATCH}.check_decode_mem",
        "AROUND",
        relieve_decode,
        "a decode step that does not fit ends in retraction",
    ),
    Hook(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        "AFTER",
        let_in,
        "who waits for memory waits until a request has ended; SGLang takes for granted that an "
        "empty batch has the whole pool",
    ),
    *(
        Hook(
            f"sglang.srt.managers.schedule_policy.PrefillAdder.{method}",
            "AROUND",
            stop_at_cut,
            "chunks are cut by budget alone, and a question apart is read after compression",
        )
        for method in ("add_one_req", "add_chunked_req")
    ),
    Hook(
        f"{_SCHEDULER}.process_batch_result",
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
        f"{_SCHEDULER}.__init__",
        "AFTER",
        check_scheduler,
        "plugin errors are swallowed upstream",
    ),
)
