"""SGLang's radix cache, with requests that leave it compressed.

A prompt is inserted into the tree as always. Then, if its request asked for it, the KVs
worth keeping are copied into blocks the request owns, and the request lets go of the tree:
blocks in the tree are never modified, so sharing stays safe.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from array import array
from collections.abc import Iterator

import torch
from kvc_kernels.compact import compact
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, maybe_cache_unfinished_req
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sgl_kvc import report
from sgl_kvc.cache import continual
from sgl_kvc.cache.memory import StateMemory
from sgl_kvc.cache.plan import Plan
from sgl_kvc.policy.base import ModelFacts
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.spec import CUSTOM_PARAM, CompressionSpec, Extent, methods, parse

logger = logging.getLogger(__name__)


class CompressingRadixCache(RadixCache):
    """A `RadixCache` that compresses requests after their prefill.

    Attributes
    ----------
    memory : what scorers that look at every query saw of earlier prompts.
    plans : prompts being prefilled that will be compressed, by request row. The attention
        backend lets them look at every chunk.
    stream : the CUDA stream that forwards run in, where it is not the scheduler's own.
    """

    stream: torch.cuda.Stream | None = None

    def __init__(self, params: CacheInitParams):
        self.pool: ArenaKVPool = params.token_to_kv_pool_allocator.get_kvcache()
        self.plans: dict[int, Plan] = self.pool.plans
        self.memory = StateMemory()
        self.block = report.BlockSize(params.page_size, self.pool.block_bytes)
        self._released = False
        super().__init__(params)

    def reset(self) -> None:
        """Forget the tree and every request's compression state."""
        super().reset()
        self.plans.clear()
        self.memory.clear()
        self.pool.segments.reset()

    # ------------------------------------------------------------------ a request's life

    def plan_request(self, req) -> None:
        """Decide, before a chunk of `req` is prefilled, whether it will be compressed.

        Sets ``req.kvc_report`` and, if it will be, ``plans[req.req_pool_idx]``.
        """
        row = req.req_pool_idx
        if row in self.plans or self.pool.segments.begin(row) is not None:
            return  # a later chunk of the same prompt
        spec, tokens = spec_of(req), compressible(req)
        skipped = None if spec.off else self._reason_to_skip(req, spec, len(tokens))
        if not spec.off and skipped is None:
            self.plans[row] = Plan(
                spec,
                tokens,
                self.page_size,
                self.pool.layer_num,
                self.pool.facts,
                getattr(req, "kvc_states", None),
            )
            skipped = "the request ended before its first token was decoded"
        req.kvc_kept = None
        req.kvc_report = report.uncompressed(len(tokens), self.block, skipped)

    def room_before_question(self, req) -> int | None:
        """Tokens of `req` to be prefilled before it is compressed and its question read.

        None where a chunk need not stop: no question apart, or compressed already.
        """
        spec = spec_of(req)
        if spec.off or not spec.question_tokens:
            return None
        tokens = len(compressible(req))
        if self._reason_to_skip(req, spec, tokens) is not None:
            return None
        room = Extent.of(spec, tokens, self.page_size).end - len(req.prefix_indices)
        return room if room > 0 else None

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match at most the prompt minus the window when the request will be compressed.

        The queries its scores need have to be computed, and a request's result must not
        depend on what others left in the cache. A scorer that looks at every query forbids any
        match, unless it is remembered what it saw of this prompt.
        """
        req = params.req
        if req is not None:
            spec, key = spec_of(req), params.key
            extent = Extent.of(spec, len(compressible(req)), self.page_size)
            if extent.compressed:
                limit = min(len(key), extent.match_limit_with_states)
                if spec.all_queries:
                    req.kvc_states = self.memory.get(self._memory_key(req))
                    limit = limit if req.kvc_states else 0
                params.key = RadixKey(key.token_ids, key.extra_key, key.is_bigram, limit)
        return super().match_prefix(params)

    def cache_unfinished_req(self, req, chunked: bool = False) -> None:
        """Insert what was prefilled into the tree; compress after the last chunk.

        The last chunk of what is compressed: a question may follow. What follows is the
        request's own and stays out of the tree, whose prefixes are not compressed.
        """
        row, done = req.req_pool_idx, len(req.get_fill_ids())
        if self.pool.segments.begin(row) is not None:
            req.prefix_indices = self._row(row, done)
            return
        plan = self.plans.get(row)
        if plan is None or len(req.prefix_indices) < plan.scored:
            super().cache_unfinished_req(req, chunked=chunked)
        if plan is not None and done >= plan.scored:
            self._compress(req, plan)
            req.prefix_indices = self._row(row, done)
        elif not chunked and plan is None and done < self.page_size and self._goes_on(req):
            with self.behind_forward():
                self.pool.segments.count(row)
                self.pool.reset_metric(self._row(row, done))

    def cache_finished_req(
        self, req, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        """Release a finished, aborted or retracted request's KVs."""
        row = req.req_pool_idx
        self.plans.pop(row, None)
        begin = self.pool.segments.begin(row)
        if self.pool.segments.counts(row):
            continual.note_peak(req, kv_len_to_handle - (begin or 0))
        if begin is None:
            self.pool.segments.clear(row)
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
            return
        owned = self.req_to_token_pool.req_to_token[row, begin:kv_len_to_handle]
        self.token_to_kv_pool_allocator.free_segment(owned, start_pos=begin)
        self.pool.segments.clear(row)

    def _memory_key(self, req) -> tuple:
        """What the states of a scorer with ``observe`` follow from."""
        key = getattr(req, "kvc_memory_key", None)
        if key is None or key[0] != len(compressible(req)):
            spec, tokens = spec_of(req), compressible(req)
            scored = Extent.of(spec, len(tokens), self.page_size).scored
            digest = hashlib.blake2b(memoryview(array("q", tokens[:scored]))).digest()
            parameters = tuple(sorted(spec.parameters.items()))
            key = (len(tokens), digest, req.extra_key, spec.scorer, parameters, spec.sinks)
            req.kvc_memory_key = key
        return key[1:]

    def _row(self, row: int, tokens: int) -> torch.Tensor:
        return self.req_to_token_pool.req_to_token[row, :tokens].to(torch.int64, copy=True)

    def take_released(self) -> bool:
        """Whether compression has freed memory since this was last asked."""
        released, self._released = self._released, False
        return released

    # ----------------------------------------------------------------------- compression

    def _goes_on(self, req) -> bool:
        """Whether `req` asked to be compressed again during decode, and can be."""
        return bool(spec_of(req).recompress_every) and not self.disable and req.session is None

    def _reason_to_skip(self, req, spec: CompressionSpec, prompt_tokens: int) -> str | None:
        if self.disable:
            return "the server's prefix cache is disabled"
        if req.session is not None:
            return "the request belongs to a session"
        reason = Extent.of(spec, prompt_tokens, self.page_size).skipped
        return reason or missing_facts(spec, self.pool.facts)

    def allocate(self, tokens: int) -> torch.Tensor | None:
        """Slots of `tokens` in whole blocks, evicted from the tree if need be; None: too full."""
        allocator = self.token_to_kv_pool_allocator
        if allocator.available_size() + self.evictable_size() < tokens:
            return None
        evict_from_tree_cache(self, tokens)
        return allocator.alloc(tokens)

    @contextlib.contextmanager
    def behind_forward(self, *used: torch.Tensor) -> Iterator[None]:
        """Have the device do what follows behind the forward that may be under way.

        With overlap scheduling that forward still writes KVs: of this prompt, or of a request
        that has ended, to blocks that are ours now. `used` were allocated outside.
        """
        if self.stream is None:
            yield
            return
        scheduling = torch.cuda.current_stream()
        self.stream.wait_stream(scheduling)
        with torch.cuda.stream(self.stream):
            yield
        for tensor in used:
            tensor.record_stream(self.stream)
        scheduling.wait_stream(self.stream)  # rows are read there

    def _compress(self, req, plan: Plan) -> None:
        """Copy what is worth keeping into own blocks, and let go of the tree's copy.

        Without room for the copy the plan stays, and `compress_due` tries again.
        """
        row, tokens = req.req_pool_idx, plan.segment_blocks * self.page_size
        segment = self.allocate(tokens)
        if segment is None:
            req.kvc_report["skipped"] = "no free blocks to compress into"
            return
        del self.plans[row]
        begin = plan.tail_begin - tokens
        with self.behind_forward(segment):
            selection = plan.select()
            if plan.spec.all_queries:
                self.memory.put(self._memory_key(req), plan.states)
            slots = self.req_to_token_pool.req_to_token[row]
            source = slots[: plan.tail_begin].clone()
            target = segment[:: self.page_size] // self.page_size
            arenas = self.pool.arena_k, self.pool.arena_v
            compact(*arenas, source, selection.positions, selection.pages, target)
            if plan.spec.recompress_every:
                tail = slots[plan.tail_begin : plan.scored].long()
                continual.start_metric(self.pool, plan, selection, target, tail)
                self.pool.reset_metric(slots[plan.scored : req.kv_committed_len].long())
                self.pool.segments.count(row)
            slots[:begin] = 0
            slots[begin : plan.tail_begin] = segment.to(slots.dtype)
            self.pool.segments.set(row, begin, plan.tail_begin, selection.pages)
            tail_tokens = plan.prompt_tokens - plan.tail_begin
            pages = self.pool.segments.pages(row)
            req.kvc_kept = report.KeptPerHead(pages, self.page_size, tail_tokens)
        self.dec_lock_ref(req.last_node)
        self._released = True
        req.last_node = self.root_node
        req.cache_protected_len = begin
        req.kvc_report = report.compressed(
            plan.spec.policy,
            plan.spec.rate,
            plan.prompt_tokens,
            plan.tail_begin,
            plan.segment_blocks,
            self.block,
        )

    def compress_due(self, req) -> None:
        """Before a decode step of `req`: compress its prompt, or what it holds again, if due."""
        plan = self.plans.get(req.req_pool_idx)
        if plan is not None:
            if len(req.prefix_indices) >= plan.scored:  # there was no room before
                self._compress(req, plan)
            elif req.sampling_params.max_new_tokens > 1:
                maybe_cache_unfinished_req(req, self)
        elif self.pool.segments.counts(req.req_pool_idx):
            self._released |= continual.recompress(self, req, spec_of(req))


def missing_facts(spec: CompressionSpec, facts: ModelFacts) -> str | None:
    """What the policy of a request needs and the model has not, in a sentence."""
    used = (methods("scorers")[spec.scorer], methods("apportioners")[spec.apportioner])
    for method in used:
        for need in method.needs:
            if getattr(facts, need) is None:
                return f"{method.name} needs the model's {need.replace('_', ' ')}; there is none"
    return None


def compressible(req) -> list[int]:
    """Token ids that the knob of a request is about: what is prefilled.

    After a retraction that includes what was generated, unless a question is kept apart: it
    stays where it was.
    """
    if spec_of(req).question_tokens:
        return req.origin_input_ids
    return req.full_untruncated_fill_ids


def spec_of(req) -> CompressionSpec:
    """The knob of a request; SGLang's HTTP process has validated it (compat)."""
    spec = getattr(req, "kvc_spec", None)
    if spec is None:
        params = req.sampling_params.custom_params
        spec = parse(params.get(CUSTOM_PARAM) if isinstance(params, dict) else None)
        req.kvc_spec = spec
    return spec
