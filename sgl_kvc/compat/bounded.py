"""Prompts whose prefill is bounded (`prefill_block`): they may be longer than the pool.

SGLang takes for granted that a request holds all its tokens: it refuses a prompt that is longer
than the pool, and lets one in only where all of it fits. What such a request really holds at most
follows from its knob and its length (`Extent.bound`), on every rank alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sgl_kvc.compat import BACKEND
from sgl_kvc.compat.hook import Hook


def limit_answer(original, scheduler, req) -> None:
    """``Scheduler.init_req_max_new_tokens``: the pool has to hold bound and answer, no more.

    SGLang makes room for the answer by the prompt's length. It is shown a prompt as long as the
    bound instead; what the context has room for is looked at here.
    """
    bound = None
    if scheduler.server_args.attention_backend == BACKEND:
        from sgl_kvc.cache.bounded import tokens_at_most

        cache = scheduler.tree_cache
        bound = tokens_at_most(
            req, cache.page_size, cache.pool.facts, cached=not cache.disable
        )
    if bound is None or bound + 2 * cache.page_size + 1 > scheduler.max_total_num_tokens:
        original(scheduler, req)
        return
    prompt, context = req.origin_input_ids, scheduler.model_config.context_len
    req.origin_input_ids = prompt[:bound]
    try:
        original(scheduler, req)
    finally:
        req.origin_input_ids = prompt
    params = req.sampling_params
    params.max_new_tokens = min(params.max_new_tokens, max(0, context - len(prompt) - 2))
    params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)
    req.kvc.input_limit = context - 6  # as SGLang has it where the pool is larger


def check_length(original, req, max_req_input_len: int, allow_auto_truncate: bool) -> str | None:
    """``validate_input_length``: such a prompt may be as long as the model's context."""
    limit = getattr(getattr(req, "kvc", None), "input_limit", None)
    return original(req, limit or max_req_input_len, allow_auto_truncate)


@contextlib.contextmanager
def counted(adder, req) -> Iterator[None]:
    """While `req` is added to a batch: SGLang counts what it will hold, not its whole prompt.

    What comes after this chunk is set aside, so that nobody else is let in on it meanwhile.
    """
    rest = None
    if hasattr(adder.tree_cache, "begin_prefill"):
        from sgl_kvc.cache.bounded import tokens_to_come

        rest = tokens_to_come(req, adder.tree_cache.page_size)
    if rest is None:
        yield
        return
    whole, added = len(req.full_untruncated_fill_ids), len(adder.can_run_list)
    surplus = max(0, whole - len(req.prefix_indices) - rest) if req.req_pool_idx is None else 0
    adder.rem_total_token_offset -= surplus
    try:
        yield
    finally:
        adder.rem_total_token_offset += surplus
    if len(adder.can_run_list) > added and req.extend_range.end < whole:
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        answer = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        adder.rem_total_token_offset += max(0, rest - req.extend_range.length) + answer


_REASON = "SGLang takes for granted that a request holds all its tokens"

HOOKS = (
    Hook("sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens", "AROUND",
         limit_answer, _REASON),
    Hook("sglang.srt.managers.utils.validate_input_length", "AROUND", check_length, _REASON),
)
