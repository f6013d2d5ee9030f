"""Stored segments that stay until they are released.

A pin is one more lock on a segment's node of the tree. When it ends is up to whoever asked for it:
clocks of tensor-parallel ranks differ, and what one of them evicts all have to.
"""

from __future__ import annotations

import dataclasses

from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode

from sgl_kvc.cache.segments import StoredSegment

#: Of the pool, what pinned segments may hold together.
_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class _Pin:
    stored: StoredSegment
    node: TreeNode
    expires: float | None


class Pins:
    """The pinned segments of one prefix cache, by `StoredSegment.name`.

    Parameters
    ----------
    cache : whose entries they are.
    """

    def __init__(self, cache: RadixCache):
        self._cache = cache
        self._pins: dict[str, _Pin] = {}

    def pin(self, stored: StoredSegment, node: TreeNode, expires: float | None) -> bool:
        """Keep `stored`, and what precedes it; a second time changes when it expires.

        Parameters
        ----------
        node : the tree's, of `stored`.
        expires : when it will be released, seconds since 1970; it is told, nothing happens then.

        Returns
        -------
        pinned : False where pinned segments would hold more than half of the pool.
        """
        old = self._pins.get(stored.name)
        if old is not None:
            self._pins[stored.name] = dataclasses.replace(old, expires=expires)
            return True
        held = sum(each.stored.held_tokens for each in self._pins.values())
        if held + stored.held_tokens > _SHARE * self._cache.token_to_kv_pool_allocator.size:
            return False
        self._cache.inc_lock_ref(node)
        self._pins[stored.name] = _Pin(stored, node, expires)
        return True

    def release(self, name: str) -> bool:
        """Let the segment be evicted like others. Returns whether it was pinned."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._cache.dec_lock_ref(pin.node)
        return pin is not None

    def release_oldest(self) -> str | None:
        """Release the one that was pinned first; its name, None where there is none."""
        name = next(iter(self._pins), None)
        if name is not None:
            self.release(name)
        return name

    def expiry(self, name: str) -> tuple[bool, float | None]:
        """Whether it is pinned, and when it expires."""
        pin = self._pins.get(name)
        return pin is not None, pin.expires if pin is not None else None

    def clear(self) -> None:
        """Forget everything; the tree is gone."""
        self._pins.clear()
