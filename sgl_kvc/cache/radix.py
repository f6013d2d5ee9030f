"""SGLang's radix cache, with requests that leave it compressed.

A prompt is inserted into the tree as always. Then, if its request asked for it, the KVs
worth keeping are copied into blocks the request owns, and the request lets go of the tree:
blocks in the tree are never modified, so sharing stays safe.

What a request's row of ``req_to_token`` holds, by position::

    before          [ the tree's, locked  . . . . . . . . . . . . . )[ its own )
                    0                                               S          length
    compressed      [ the tree's, locked )[ 0: released )[ segment )[ its own )
                    0                    begin           F          S          length
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_kvc.cache import bounded, continual, timing
from sgl_kvc.cache.accounting import Compactions
from sgl_kvc.cache.base import PrefixCache
from sgl_kvc.cache.compaction import begin_reading, begin_scoring, compress
from sgl_kvc.cache.request import Request, cannot_compress
from sgl_kvc.cache.segment_tree import SegmentRadixCache
from sgl_kvc.cache.sharing import Sharing
from sgl_kvc.cache.states import StateCache
from sgl_kvc.cache.turns import compress_turn, prepare_turn
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.segment import Segment
from sgl_kvc.pool.streams import behind
from sgl_kvc.report import BlockSize
from sgl_kvc.spec import Extent

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class CompressingRadixCache(SegmentRadixCache, PrefixCache):
    """A radix cache that compresses requests after their prefill.

    Attributes
    ----------
    states : what scorers that look at every query saw of earlier prompts.
    sharing : which requests hold the same blocks.
    compactions : how many there were, and how long they took.
    stream : the CUDA stream that forwards run in, where it is not the scheduler's own.
    """

    stream: torch.cuda.Stream | None = None

    def __init__(self, params: CacheInitParams):
        self.pool: ArenaKVPool = params.token_to_kv_pool_allocator.get_kvcache()
        arenas = self.pool.arena_k, self.pool.arena_v
        self.states = StateCache.for_pool(sum(arena.nbytes for arena in arenas))
        self.sharing = Sharing()
        self.compactions = Compactions()
        self.block = BlockSize(params.page_size, self.pool.block_bytes)
        self._released = False
        self._promised = 0  # tokens that the next decode step will take
        super().__init__(params)

    def reset(self) -> None:
        """Forget the tree and every request's compression state."""
        super().reset()
        self.states.clear()
        self.sharing.clear()
        self.pool.spans.reset()
        self.pool.requests.clear()

    # ------------------------------------------------------------------ a request's life

    def begin_prefill(self, req: Req) -> None:
        """Before a chunk of `req` is prefilled: decide whether it will be compressed.

        Sets the report and, if it will be, the scores, which attention then feeds.
        """
        request = Request.of(req)
        self.holds.tell(request.arrived)
        request.row = req.req_pool_idx
        self.pool.requests[req.rid] = request
        if request.bounded is not None:
            bounded.note_peak(self, req)
        if request.scores is not None or request.segment is not None:
            return  # a later chunk of the same prompt
        extent, tokens, found = self._extent(req), request.prompt(req), request.found
        if found is not None and len(req.prefix_indices) >= found.segment.end:
            self.sharing.add(request, tokens[: found.segment.begin], req.extra_key, self.page_size)
            request.begun = found.segment.end if request.reuses(req) else None
            begin_reading(self, req, found)
            found.hits += 1
            prepare_turn(self, req)
            return
        shared = extent.begin if extent.prefill_block else None
        self.sharing.add(request, tokens[:shared], req.extra_key, self.page_size)
        begin_scoring(self, req)
        if extent.prefill_block and len(req.prefix_indices) >= extent.begin:
            bounded.begin(self, req)
            bounded.note_peak(self, req)

    def room_before_cut(self, req: Req) -> int | None:
        """Tokens of `req` to be prefilled before it is compressed and the rest of it is read.

        None where a chunk need not stop: nothing is read after compression, or it is compressed.
        """
        done = len(req.prefix_indices)
        cut = self._extent(req).next_cut(done)
        return None if cut is None else cut - done

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match at most the prompt minus the window when the request will be compressed.

        The queries its scores need have to be computed, and a request's result must not
        depend on what others left in the cache. A scorer that looks at every query takes nothing
        from the cache, unless it is remembered what it saw of this prompt.
        """
        req = params.req
        if req is not None:
            extent, key, request = self._extent(req), params.key, Request.of(req)
            request.known = None
            compressed = self.match_segment(req, key)
            if compressed is not None:
                return compressed
            if extent.compressed:
                # Kept until the prefill begins: others' states may displace them before it.
                request.known = request.known_states(req, self.states)
                known = request.known is not None
                limit = extent.match_limit_with_states if known else extent.match_limit
                limit = min(len(key), limit)
                params.key = RadixKey(key.token_ids, key.extra_key, key.is_bigram, limit)
        return super().match_prefix(params)

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        """Insert what was prefilled into the tree; compress after the last chunk.

        The last chunk of what is compressed: a question may follow. What follows is inserted
        behind a stored segment, or is the request's own.

        ::

            before      [ the tree's, locked )[ own: the chunk . . . . . . )
            a chunk     [ the tree's, locked . . . . . . . . . )[ own: < P )
            compressed  [ the tree's )[ released )[ segment )[ own: tail . )
                        0            begin        F          S         done
        """
        request, done = Request.of(req), len(req.get_fill_ids())
        if request.stored is not None:
            self.cache_behind(req, request.stored, chunked=chunked)
            if request.extent is not None and done >= request.extent.scored:
                self._released |= compress_turn(self, req)
                req.prefix_indices = self.row_slots(req)[:done].to(torch.int64, copy=True)
            return
        extent = request.extent
        if extent is not None and extent.prefill_block and done >= extent.begin:
            self._advance(req, done, chunked=chunked)
        if request.segment is not None:
            req.prefix_indices = self.row_slots(req)[:done].to(torch.int64, copy=True)
            return
        due = extent is not None and extent.compressed and done >= extent.scored
        if extent is None or not due or len(req.prefix_indices) < extent.scored:
            super().cache_unfinished_req(req, chunked=chunked)
        if due:
            request.remember_states(req, self.states)
            if not request.spec.on_pressure:
                self.compress(req)
            elif isinstance(request.scores, PromptScores):
                request.scores.settle(with_scores=request.goes_on)
            req.prefix_indices = self.row_slots(req)[:done].to(torch.int64, copy=True)

    def cache_finished_req(
        self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        """Release a finished, aborted or retracted request's KVs.

        ::

            uncompressed   [ inserted into the tree, or freed  . . . . )
            compressed     [ unlocked )[ nothing )[ freed  . . . . . . )
                           0        begin        F                     length
        """
        request, row = Request.of(req), req.req_pool_idx
        request.remember_states(req, self.states)
        segment, stored = request.segment, request.stored
        if request.goes_on and request.report is not None and segment is not None:
            request.report.note_peak(req.kv.kv_allocated_len - segment.row_begin + segment.begin)
        if self.pool.spans.is_compressed(row) or self.pool.spans.tracks_attention(row):
            with self.behind_forward():  # the one under way may still read the row
                self.pool.spans.clear(row)
        self.pool.requests.pop(req.rid, None)
        self.sharing.remove(request)
        request.retract()
        hold_s = request.spec.hold_s if is_insert else 0
        if stored is not None:
            return self.finish_behind(req, stored, kv_len_to_handle, is_insert, hold_s)
        if segment is None:
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
            return self.hold_ended(req, kv_len_to_handle, hold_s)
        # All at once: SGLang may want to keep less than was decoded (--strip-thinking-cache) and
        # would free the rest by position, whatever lies there.
        end = req.kv.kv_allocated_len
        owned = self.row_slots(req)[segment.row_begin : end]
        self.token_to_kv_pool_allocator.free_segment(owned, start_pos=segment.row_begin)
        req.kv.kv_allocated_len = kv_len_to_handle
        self.dec_lock_ref(req.last_node)
        return self.hold_ended(req, kv_len_to_handle, hold_s)

    def take_released(self) -> bool:
        """Whether compression has freed memory since this was last asked."""
        released, self._released = self._released, False
        return released

    # ----------------------------------------------------------------------- compression

    def compress_due(self, reqs: Sequence[Req], promised: int) -> None:
        """Before a decode step: compress what is due (`timing.compress_due`).

        Parameters
        ----------
        promised : tokens of whole blocks that this step will take; they are left alone.
        """
        with self._promise(promised):
            timing.compress_due(self, reqs)

    def relieve(self, reqs: Sequence[Req], promised: int, *, once: bool = False) -> bool:
        """Memory is short: compress requests that have waited for that (`timing.relieve`)."""
        with self._promise(promised):
            return timing.relieve(self, reqs, promised, once=once)

    @contextlib.contextmanager
    def _promise(self, tokens: int) -> Iterator[None]:
        self._promised = tokens
        try:
            yield
        finally:
            self._promised = 0

    def recompress(self, req: Req) -> bool:
        return self._timed(continual.recompress, req)

    def compress(self, req: Req) -> bool:
        return self._timed(compress, req)

    def _timed(self, how: Callable[[PrefixCache, Req], bool], req: Req) -> bool:
        with self.compactions.timed():
            done = how(self, req)
        if done:
            self._released, Request.of(req).compressed_at = True, self.compactions.total
        return done

    def point_row(self, req: Req, segment: Segment) -> None:
        row_slots = self.row_slots(req)
        row_slots[segment.begin : segment.row_begin] = 0
        row_slots[segment.row_begin : segment.end] = segment.slots.to(row_slots.dtype)
        self.pool.spans.install(req.req_pool_idx, segment)

    def hold_only(self, req: Req, tokens: int) -> None:
        node = self.root_node
        if tokens:
            key = RadixKey(Request.of(req).prompt(req), req.extra_key, limit=tokens)
            node = super().match_prefix(MatchPrefixParams(key=key)).last_device_node
        self.lock_instead(req, node)

    def free_tokens(self) -> int:
        return self.token_to_kv_pool_allocator.available_size() + self.evictable_size()

    def allocate(self, tokens: int) -> torch.Tensor | None:
        if self.free_tokens() < tokens + self._promised:
            return None
        evict_from_tree_cache(self, tokens)
        return self.token_to_kv_pool_allocator.alloc(tokens)

    def behind_forward(self, *used: torch.Tensor) -> AbstractContextManager[None]:
        return behind(self.stream, *used)

    # --------------------------------------------------------------------------- helpers

    def _advance(self, req: Req, done: int, *, chunked: bool) -> None:
        """`done` tokens of a prompt whose prefill is bounded are there."""
        if Request.of(req).segment is None:
            super().cache_unfinished_req(req, chunked=chunked)  # what precedes compression
            bounded.begin(self, req)
        elif bounded.is_due(req):
            with self.compactions.timed():
                bounded.compress_block(self, req, done)
            self._released = True

    def _extent(self, req: Req) -> Extent:
        request = Request.of(req)
        unable = cannot_compress(req, cached=not self.disable)
        return request.measure(req, self.page_size, unable, self.pool.facts)
