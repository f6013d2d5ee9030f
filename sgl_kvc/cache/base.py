"""What compressing needs of the prefix cache: the contract that `radix.py` keeps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sgl_kvc.cache.segments import StoredSegment
from sgl_kvc.cache.sharing import Sharing
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.segment import Segment
from sgl_kvc.report import BlockSize

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class PrefixCache(Protocol):
    """A prefix cache whose requests can leave it compressed.

    Attributes
    ----------
    pool : the arena and the span table.
    page_size : tokens of a block.
    block : the same, with its bytes.
    sharing : which requests hold the same blocks.
    token_to_kv_pool_allocator : SGLang's, of whole blocks.
    """

    pool: ArenaKVPool
    page_size: int
    block: BlockSize
    sharing: Sharing
    token_to_kv_pool_allocator: Any

    def compress(self, req: Req) -> bool:
        """Compress the prompt of `req`, whose scores are complete; whether that was done."""

    def recompress(self, req: Req) -> bool:
        """Compress what `req` holds again, if that is due; whether that was done."""

    def free_tokens(self) -> int:
        """What is free or can be evicted."""

    def allocate(self, tokens: int) -> torch.Tensor | None:
        """Slots of `tokens` in whole blocks, evicted from the cache if need be: int64 [tokens].

        None where there is no room. What the next decode step was promised is not given away.
        """

    def behind_forward(self, *used: torch.Tensor) -> AbstractContextManager[None]:
        """Have the device do what follows behind the forward that may be under way.

        With overlap scheduling that forward still writes KVs: of this prompt, or of a request
        that has ended, to blocks that are ours now. `used` were allocated outside.
        """

    def row_slots(self, req: Req) -> torch.Tensor:
        """The row of `req` in ``req_to_token``, to be read and written."""

    def point_row(self, req: Req, segment: Segment) -> None:
        """Write `segment` into the row of `req`, and where it lies into the span table."""

    def find_segment(self, req: Req) -> StoredSegment | None:
        """The stored segment that stands for exactly what is compressed of the prompt of `req`.

        None also where the request must not read one (`Request.shares_segment`).
        """

    def store_segment(self, req: Req, segment: Segment) -> StoredSegment:
        """Make `segment`, which `req` has made of its prompt, an entry of the cache."""

    def hold_segment(self, req: Req, stored: StoredSegment) -> None:
        """Lock `stored`, and what precedes it, instead of what `req` has locked."""

    def pin_segment(self, stored: StoredSegment, expires: float | None) -> bool:
        """Keep `stored` until it is released; False where there is no room for more."""

    def hold_only(self, req: Req, tokens: int) -> None:
        """Lock the cache's first `tokens` of the prompt, a block boundary, and nothing behind."""
