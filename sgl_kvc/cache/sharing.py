"""Who shares which blocks of a prompt: what compressing one request frees, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from sgl_kvc.cache.request import Request
from sgl_kvc.spec import chained_digests


class Sharing:
    """How many requests, of those that hold memory now, begin with the same blocks.

    A prefix that k requests begin with is held once. Compressed, each of them holds a copy of its
    own of what is kept: k copies. So a block counts 1/k for each of the k, compressed or not.

    Attributes
    ----------
    holders : by block digest, how many.
    """

    def __init__(self) -> None:
        self.holders: Counter[Hashable] = Counter()

    def add(
        self, request: Request, tokens: Sequence[int], namespace: str | None, page: int
    ) -> None:
        """Count `request`, whose prompt is `tokens`. A second time does nothing."""
        if not request.block_digests:
            request.block_digests = chained_digests(tokens, namespace, page)
            self.holders.update(request.block_digests)

    def remove(self, request: Request) -> None:
        """No longer count `request`, which has let go of its memory."""
        for digest in request.block_digests:
            if self.holders[digest] > 1:
                self.holders[digest] -= 1
            else:
                del self.holders[digest]
        request.block_digests = []

    def share(self, request: Request, begin: int, end: int) -> float:
        """Blocks [begin, end) of the prompt, each divided by the requests that share it."""
        return sum(1 / self.holders[digest] for digest in request.block_digests[begin:end])

    def clear(self) -> None:
        """Forget everybody."""
        self.holders.clear()
