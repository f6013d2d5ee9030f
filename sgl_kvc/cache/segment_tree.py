"""SGLang's radix cache with segments among its entries (`segments.py` says how).

Who owns which blocks of a request that reads a stored segment, and by what they are counted::

    [ prefix )[ segment )[ tail, inserted )[ tail, not yet )
      the tree's, locked: protected          the request's: uncached

The lock on the tail's last node is one on all above it. When the request ends, is aborted or
retracted, it is dropped: all of it may then be evicted, the tail before the segment, the segment
before the prefix.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sgl_kvc.cache.holds import Holds
from sgl_kvc.cache.pins import Pins
from sgl_kvc.cache.request import Request
from sgl_kvc.cache.segments import Namespace, SegmentStore, StoredSegment
from sgl_kvc.pool.segment import Segment
from sgl_kvc.report import BlockSize

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class SegmentRadixCache(RadixCache):
    """A `RadixCache` some of whose entries are segments.

    Attributes
    ----------
    segments : which ones, by the tokens they stand for.
    pins : which of them stay.
    holds : which entries are evicted last.
    block : the pool's unit, set by the subclass.
    """

    block: BlockSize
    eviction_strategy: EvictionStrategy

    def __init__(self, params: CacheInitParams):
        self.segments = SegmentStore(params.page_size)
        self.pins = Pins(self)
        super().__init__(params)
        self.holds = Holds(self.eviction_strategy)
        self.eviction_strategy = self.holds

    def reset(self) -> None:
        """Forget the tree and its segments."""
        super().reset()
        self.segments.clear()
        self.pins.clear()

    def row_slots(self, req: Req) -> torch.Tensor:
        return self.req_to_token_pool.req_to_token[req.req_pool_idx]

    def find_segment(self, req: Req) -> StoredSegment | None:
        request = Request.of(req)
        if not request.shares_segment(req):
            return None
        assert request.extent is not None
        tokens, digests = request.prompt(req), request.digests(req, self.page_size)
        end = request.extent.end
        found = self.segments.find(request.namespace(req), tokens, digests, end)
        return found if found is not None and found.segment.end == end else None

    def find_turn(self, req: Req, limit: int) -> StoredSegment | None:
        """The stored segment of the longest prefix of the prompt, of at most `limit` tokens.

        What a turn has left or, where that reaches further, what was kept before a question apart.
        """
        request = Request.of(req)
        tokens, digests = request.prompt(req), request.digests(req, self.page_size)
        found = (
            self.segments.find(request.namespace(req, turn=turn), tokens, digests, limit)
            for turn in (True, False)
        )
        return max(filter(None, found), key=lambda each: each.segment.end, default=None)

    def store_segment(self, req: Req, segment: Segment) -> StoredSegment:
        request = Request.of(req)
        return self.put_segment(
            request.namespace(req, turn=request.reuses(req)),
            request.prompt(req),
            request.digests(req, self.page_size),
            segment,
            prefix=self.row_slots(req)[: segment.begin],
            priority=req.priority or 0,
        )

    def put_segment(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        digests: Sequence[Hashable],
        segment: Segment,
        prefix: torch.Tensor,
        priority: int = 0,
    ) -> StoredSegment:
        """Make `segment` an entry. Its blocks are the tree's from here on; nobody holds them yet.

        Parameters
        ----------
        digests : `chained_digests` of the tokens.
        prefix : [begin], the slots of what precedes it. They are in the tree, and locked.
        """
        stored = self.segments.add(namespace, tokens, digests, segment)
        value = torch.cat([prefix.to(torch.int64), segment.slots])
        key = stored.key(stored.tokens)
        self.insert(InsertParams(key=key, value=value, priority=priority))
        return stored

    def match_segment(self, req: Req, key: RadixKey) -> MatchResult | None:
        """What `req` finds in the cache beginning with a stored segment; None if it finds none.

        Sets its `Request.found`.
        """
        request = Request.of(req)
        assert request.extent is not None
        request.found = self.find_segment(req) if len(key) >= request.extent.end else None
        if request.found is not None:
            return self.match_behind(request.found, key)
        return self._match_turn(req, key) if request.reuses(req) else None

    def _match_turn(self, req: Req, key: RadixKey) -> MatchResult | None:
        """What a request that may begin with another turn's segment begins with; None if nothing.

        The segment, and behind it all but the last window.
        """
        request = Request.of(req)
        found = self.find_turn(req, len(key))
        if found is None:
            return None
        assert request.extent is not None
        limit = min(len(key), max(found.segment.end, request.extent.match_limit))
        match = self.match_behind(found, RadixKey(key.token_ids, key.extra_key, limit=limit))
        if request.spec.reuse == "both":
            short = RadixKey(key.token_ids, key.extra_key, limit=request.extent.match_limit)
            whole = super().match_prefix(MatchPrefixParams(key=short))
            if len(whole.device_indices) >= len(match.device_indices):
                return whole
        request.found = found
        return match

    def match_behind(self, stored: StoredSegment, key: RadixKey) -> MatchResult:
        """What the tree has of `key`, at least ``segment.end`` tokens, beginning with `stored`.

        Returns
        -------
        As `match_prefix`, the slots as a row has them: zeros at released positions.
        """
        params = MatchPrefixParams(key=stored.key(key.token_ids[: len(key)]))
        found = super().match_prefix(params)
        assert len(found.device_indices) >= stored.held_tokens, "not in the tree"
        return found._replace(device_indices=stored.to_row(found.device_indices))

    def hold_segment(self, req: Req, stored: StoredSegment) -> None:
        """Lock `stored` for `req`, instead of what it has locked."""
        self.lock_instead(req, self.segment_node(stored))
        req.cache_protected_len = stored.segment.end

    def segment_node(self, stored: StoredSegment) -> TreeNode:
        """The tree's node of `stored`; it counts as used now."""
        found = super().match_prefix(MatchPrefixParams(key=stored.key(stored.tokens)))
        return found.last_device_node

    def cache_behind(self, req: Req, stored: StoredSegment, *, chunked: bool) -> None:
        """Insert what `req` has prefilled behind `stored`; as SGLang's `cache_unfinished_req`.

        ::

            before   [ the tree's, locked . . . )[ own . . . . . )
            after    [ the tree's, locked . . . . . . . . )[ own )
                     0                                   < P     done
        """
        tokens = req.get_fill_ids()
        row = self.row_slots(req)
        key, inserted = self._insert_behind(req, stored, tokens, chunked=chunked)
        self._free_behind(req, stored, req.cache_protected_len, inserted)
        found = super().match_prefix(MatchPrefixParams(key=key))
        end = len(key) + stored.gap
        behind = found.device_indices[stored.held_tokens :]
        row[stored.segment.end : end] = behind.to(row.dtype)
        self.lock_instead(req, found.last_device_node)
        req.cache_protected_len = end
        req.prefix_indices = row[: len(tokens)].to(torch.int64, copy=True)

    def finish_behind(
        self, req: Req, stored: StoredSegment, length: int, insert: bool, hold_s: int
    ) -> None:
        """`req` ends: its tokens become the tree's or are freed; as SGLang's `cache_finished_req`.

        Where SGLang wants to keep less than was decoded (``--strip-thinking-cache``), what follows
        `length` is freed too. What is then in the tree is held for `hold_s` seconds.
        """
        tokens = (req.origin_input_ids + req.output_ids)[:length]
        rest = req.cache_protected_len
        if insert and not self.disable_finished_insert:
            key, inserted = self._insert_behind(req, stored, tokens, chunked=False)
            self._free_behind(req, stored, rest, inserted)
            rest = max(rest, len(key) + stored.gap)
        self._free_behind(req, stored, rest, req.kv.kv_allocated_len)
        req.kv.kv_allocated_len = length
        self.dec_lock_ref(req.last_node)
        if hold_s:
            found = super().match_prefix(MatchPrefixParams(key=stored.key(tokens)))
            self.holds.hold(found.last_device_node, hold_s)
        stored.readers -= 1

    def hold_ended(self, req: Req, length: int, seconds: int) -> None:
        """Hold what the tree has of the first `length` tokens of `req` for some seconds."""
        if seconds:
            tokens = array("q", (req.origin_input_ids + req.output_ids)[:length])
            params = MatchPrefixParams(key=RadixKey(tokens, req.extra_key))
            self.holds.hold(super().match_prefix(params).last_device_node, seconds)

    def _insert_behind(
        self, req: Req, stored: StoredSegment, tokens: Sequence[int], *, chunked: bool
    ) -> tuple[RadixKey, int]:
        """The key of what is in the tree now, and up to which position of the row it was before."""
        row = self.row_slots(req)
        key = stored.key(tokens).page_aligned(self.page_size)
        value = stored.to_tree(row[: len(tokens)])[: len(key)]
        params = InsertParams(key=key, value=value, chunked=chunked, priority=req.priority or 0)
        return key, self.insert(params).prefix_len + stored.gap

    def _free_behind(self, req: Req, stored: StoredSegment, begin: int, end: int) -> None:
        """Free positions [begin, end) of the row of `req`, all behind `stored`."""
        assert begin >= stored.segment.end
        slots = self.row_slots(req)[begin:end]
        self.token_to_kv_pool_allocator.free_segment(slots, start_pos=begin)

    def lock_instead(self, req: Req, node: TreeNode) -> None:
        """Lock `node` and all above it for `req`, instead of what it has locked."""
        self.inc_lock_ref(node)
        self.dec_lock_ref(req.last_node)
        req.last_node = node

    def pin_segment(self, stored: StoredSegment, expires: float | None) -> bool:
        """Keep `stored` until it is released; False where there is no room for more (`Pins`)."""
        return self.pins.pin(stored, self.segment_node(stored), expires)

    def list_segments(self) -> list[dict[str, Any]]:
        """Every stored segment, as it is told outside."""
        return [self._told(each) for each in self.segments]

    def _told(self, stored: StoredSegment) -> dict[str, Any]:
        pinned, expires = self.pins.expiry(stored.name)
        segment = stored.segment
        return {
            "id": stored.name,
            "cache_salt": stored.namespace.extra_key,
            "tokens": segment.end,
            "prefix_tokens": segment.begin,
            "blocks": segment.blocks,
            "bytes": segment.blocks * self.block.bytes,
            "policy": segment.spec.policy,
            "rate": segment.spec.rate,
            "budget": segment.spec.budget,
            "readers": stored.readers,
            "hits": stored.hits,
            "pinned": pinned,
            "expires": expires,
        }

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        self.segments.evicted(node.key)
