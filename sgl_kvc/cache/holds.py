"""Entries of the prefix cache that a paused program will need, evicted after all others.

No lock is held: where memory is short and everything is held, the cache's own order decides. What
time it is follows from the requests themselves, for tensor-parallel ranks have to evict the same.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import TreeNode


class Holds(EvictionStrategy):
    """An order of eviction in which held nodes come last.

    Parameters
    ----------
    order : SGLang's, among nodes that are held, and among those that are not.

    Attributes
    ----------
    now : seconds; when the latest request that told its time arrived.
    """

    def __init__(self, order: EvictionStrategy):
        self._order = order
        self.now = 0.0

    def get_priority(self, node: TreeNode) -> tuple[bool, Any]:
        return getattr(node, "kvc_held_until", 0.0) > self.now, self._order.get_priority(node)

    def tell(self, arrived: float | None) -> None:
        """A request arrived at this time, in seconds."""
        self.now = max(self.now, arrived or 0.0)

    def hold(self, node: TreeNode, seconds: float) -> None:
        """Hold `node` and all above it for so long from now."""
        above: TreeNode | None = node
        while above is not None:
            above.kvc_held_until = max(getattr(above, "kvc_held_until", 0.0), self.now + seconds)
            above = above.parent
