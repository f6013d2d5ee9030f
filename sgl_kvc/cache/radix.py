"""SGLang's radix cache, with requests that leave it compressed.

A prompt is inserted into the tree as always. Then, if its request asked for it, the KVs
worth keeping are copied into blocks the request owns, and the request lets go of the tree:
blocks in the tree are never modified, so sharing stays safe.
"""

from __future__ import annotations

import logging

import torch
from kvc_kernels.compact import compact
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sgl_kvc import report
from sgl_kvc.cache.plan import Plan
from sgl_kvc.policy.selection import select
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.spec import CUSTOM_PARAM, CompressionSpec, parse

logger = logging.getLogger(__name__)



class CompressingRadixCache(RadixCache):
    """A `RadixCache` that compresses requests after their prefill.

    Attributes
    ----------
    plans : prompts being prefilled that will be compressed, by request row. The attention
        backend feeds them scores.
    """

    def __init__(self, params: CacheInitParams):
        self.pool: ArenaKVPool = params.token_to_kv_pool_allocator.get_kvcache()
        self.plans: dict[int, Plan] = self.pool.plans
        self.block = report.BlockSize(params.page_size, self.pool.block_bytes)
        self._released = False
        super().__init__(params)

    def reset(self) -> None:
        """Forget the tree and every request's compression state."""
        super().reset()
        self.plans.clear()
        self.pool.segments.reset()

    # ------------------------------------------------------------------ a request's life

    def plan_request(self, req) -> None:
        """Decide, before a chunk of `req` is prefilled, whether it will be compressed.

        Sets ``req.kvc_report`` and, if it will be, ``plans[req.req_pool_idx]``.
        """
        prompt_tokens = len(req.full_untruncated_fill_ids)
        plan = self.plans.get(req.req_pool_idx)
        if plan is not None and plan.prompt_tokens == prompt_tokens:
            return  # a later chunk of the same prompt
        spec = spec_of(req)
        skipped = None if spec.off else self._reason_to_skip(req, spec, prompt_tokens)
        if not spec.off and skipped is None:
            self.plans[req.req_pool_idx] = Plan(
                spec, prompt_tokens, self.page_size, self.pool.layer_num
            )
            skipped = "the request ended before its first token was decoded"
        req.kvc_report = report.uncompressed(prompt_tokens, self.block, skipped)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match at most the prompt minus the window when the request will be compressed.

        Its last `window` queries have to be computed, and a request's result must not
        depend on what others left in the cache.
        """
        req = params.req
        if req is not None:
            spec, key = spec_of(req), params.key
            tokens = len(key.token_ids)
            if not spec.off and spec.reason_to_skip(tokens, self.page_size) is None:
                limit = max(0, min(len(key), tokens - spec.window))
                params.key = RadixKey(key.token_ids, key.extra_key, key.is_bigram, limit)
        return super().match_prefix(params)

    def cache_unfinished_req(self, req, chunked: bool = False) -> None:
        """Insert what was prefilled into the tree; compress after the last chunk."""
        super().cache_unfinished_req(req, chunked=chunked)
        if not chunked:
            plan = self.plans.pop(req.req_pool_idx, None)
            if plan is not None:
                self._compress(req, plan)

    def cache_finished_req(
        self, req, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        """Release a finished, aborted or retracted request's KVs."""
        row = req.req_pool_idx
        self.plans.pop(row, None)
        begin = self.pool.segments.begin(row)
        if begin is None:
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
            return
        owned = self.req_to_token_pool.req_to_token[row, begin:kv_len_to_handle]
        self.token_to_kv_pool_allocator.free_segment(owned, start_pos=begin)
        self.pool.segments.clear(row)

    def take_released(self) -> bool:
        """Whether compression has freed memory since this was last asked."""
        released, self._released = self._released, False
        return released

    # ----------------------------------------------------------------------- compression

    def _reason_to_skip(self, req, spec: CompressionSpec, prompt_tokens: int) -> str | None:
        if self.disable:
            return "the server's prefix cache is disabled"
        if req.session is not None:
            return "the request belongs to a session"
        return spec.reason_to_skip(prompt_tokens, self.page_size)

    def _compress(self, req, plan: Plan) -> None:
        """Copy what is worth keeping into own blocks, and let go of the tree's copy."""
        row, blocks = req.req_pool_idx, plan.segment_blocks
        tokens = blocks * self.page_size
        evict_from_tree_cache(self, tokens)
        segment = self.token_to_kv_pool_allocator.alloc(tokens)
        if segment is None:
            req.kvc_report["skipped"] = "no free blocks to compress into"
            return
        selection = select(plan.scores(), plan.spec, blocks, self.page_size)
        slots = self.req_to_token_pool.req_to_token[row]
        source = slots[: plan.tail_begin].clone()
        target = segment[:: self.page_size] // self.page_size
        for arena in (self.pool.arena_k, self.pool.arena_v):
            compact(arena, source, selection.positions, selection.pages, target)

        begin = plan.tail_begin - tokens
        slots[:begin] = 0
        slots[begin : plan.tail_begin] = segment.to(slots.dtype)
        self.pool.segments.set(row, begin, plan.tail_begin, selection.pages)
        self.dec_lock_ref(req.last_node)
        self._released = True
        req.last_node = self.root_node
        req.cache_protected_len = begin
        req.prefix_indices = torch.empty((0,), dtype=torch.int64, device=segment.device)
        req.kvc_report = report.compressed(
            plan.spec.policy,
            plan.spec.rate,
            plan.prompt_tokens,
            plan.tail_begin,
            selection.pages.tolist(),
            self.block,
        )


def spec_of(req) -> CompressionSpec:
    """The knob of a request; SGLang's HTTP process has validated it (compat)."""
    spec = getattr(req, "kvc_spec", None)
    if spec is None:
        params = req.sampling_params.custom_params
        spec = parse(params.get(CUSTOM_PARAM) if isinstance(params, dict) else None)
        req.kvc_spec = spec
    return spec
