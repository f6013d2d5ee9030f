"""Segments that outlive the request that made them, found by the tokens they stand for.

A stored segment is an entry of SGLang's radix tree like any other: its slots are the value of a
node, its key is as many *markers*, tokens that no prompt has and no other segment. So the tree
locks, counts and evicts it, and ordinary nodes for what follows the segment hang below it. A prompt
cannot reach it by its own tokens; `SegmentStore` says which marker to ask for.

A request that reads a stored segment has other positions in the tree than in its row::

    row    [ prefix )[ released )[ segment )[ tail . . . )
           0        begin                  end           length
    tree   [ prefix )[ segment )[ tail . . . )             key: tokens, markers, tokens
           0        begin       end - gap    length - gap
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_kvc.pool.segment import Segment

#: Markers are 32-bit numbers (SGLang hashes its keys as such) above every token and every value
#: that SGLang puts in place of images.
_FIRST_MARKER, _MARKERS = 1 << 31, 1 << 31


class Namespace(NamedTuple):
    """Who may read a segment: requests that agree in all of this.

    Attributes
    ----------
    extra_key : SGLang's, of tenant (``cache_salt``) and LoRA.
    begin : where compression begins, a block boundary.
    shape : `CompressionSpec.shape`.
    turn : whether it is what a chat's turn has left. It then depends on the turns before, and only
        requests that allow that read it.
    """

    extra_key: str | None
    begin: int
    shape: Hashable
    turn: bool = False


@dataclasses.dataclass(eq=False)
class StoredSegment:
    """A segment in the tree.

    Attributes
    ----------
    namespace : who may read it.
    tokens : the prompt's first ``segment.end`` tokens.
    digest : `chained_digests` of their last block.
    segment : what was kept of them. Its blocks are the tree's.
    marker : the token of its key.
    hits : requests that began with it instead of being prefilled.
    readers : requests that read it now.
    """

    namespace: Namespace
    tokens: array[int]
    digest: Hashable
    segment: Segment
    marker: int
    hits: int = 0
    readers: int = 0

    @functools.cached_property
    def name(self) -> str:
        """What it is called outside: it follows from the tokens and from who may read it."""
        said = hashlib.blake2b(repr(tuple(self.namespace)).encode(), digest_size=12)
        said.update(self.tokens.tobytes())
        return said.hexdigest()

    @property
    def held_tokens(self) -> int:
        """Tokens of blocks that a lock on it keeps, those that precede it included."""
        return self.segment.end - self.gap

    @property
    def gap(self) -> int:
        """Released positions: by so much the tail's places in the tree come before its own."""
        return self.segment.row_begin - self.segment.begin

    def key(self, tokens: Sequence[int]) -> RadixKey:
        """Where the tree has `tokens`, at least ``segment.end`` that begin with this one's."""
        begin, end = self.segment.begin, self.segment.end
        markers = array("q", [self.marker]) * len(self.segment.slots)
        ids = array("q", tokens[:begin]) + markers + array("q", tokens[end:])
        return RadixKey(ids, self.namespace.extra_key)

    def to_tree(self, slots: torch.Tensor) -> torch.Tensor:
        """`slots` of a row [n], n at least ``segment.end``, as the tree has them: [n - gap]."""
        kept = torch.cat([slots[: self.segment.begin], slots[self.segment.row_begin :]])
        return kept.to(torch.int64)

    def to_row(self, slots: torch.Tensor) -> torch.Tensor:
        """The other way: [n - gap] -> [n], zeros at released positions."""
        begin = self.segment.begin
        return torch.cat([slots[:begin], slots.new_zeros(self.gap), slots[begin:]])


class SegmentStore:
    """Which segments the tree has, by namespace and tokens.

    Parameters
    ----------
    page_size : tokens of a block.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._by_tokens: dict[Namespace, dict[Hashable, StoredSegment]] = {}
        self._by_marker: dict[int, StoredSegment] = {}
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._by_marker)

    def __iter__(self) -> Iterator[StoredSegment]:
        return iter(self._by_marker.values())

    def add(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        digests: Sequence[Hashable],
        segment: Segment,
    ) -> StoredSegment:
        """Remember `segment`, of the first ``segment.end`` of `tokens`, for the caller's tree.

        Parameters
        ----------
        digests : `chained_digests` of the tokens.
        """
        marker = _FIRST_MARKER + next(self._serial) % _MARKERS
        digest = digests[segment.end // self._page_size - 1]
        own = array("q", tokens[: segment.end])
        stored = StoredSegment(namespace, own, digest, segment, marker)
        self._by_marker[marker] = stored
        self._by_tokens.setdefault(namespace, {})[digest] = stored
        return stored

    def find(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        digests: Sequence[Hashable],
        limit: int,
    ) -> StoredSegment | None:
        """The segment of the longest prefix of `tokens` that has one, of at most `limit` tokens."""
        known = self._by_tokens.get(namespace)
        if known is None:
            return None
        for block in reversed(range(min(limit // self._page_size, len(digests)))):
            stored = known.get(digests[block])
            # A digest is no proof.
            if stored is not None and stored.tokens == array("q", tokens[: stored.segment.end]):
                return stored
        return None

    def evicted(self, key: RadixKey) -> None:
        """The tree has let go of the node with this key: forget the segment, if it was one."""
        stored = self._by_marker.pop(key.token_ids[len(key) - 1], None)
        if stored is None:
            return
        known = self._by_tokens[stored.namespace]
        if known.get(stored.digest) is stored:
            del known[stored.digest]
        if not known:
            del self._by_tokens[stored.namespace]

    def clear(self) -> None:
        """Forget everything."""
        self._by_tokens.clear()
        self._by_marker.clear()
