"""Numbers that stand for a prompt's prefixes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def chained_digests(tokens: Sequence[int], namespace: str | None, page: int) -> list[Hashable]:
    """Of every whole block of `tokens`: a number that follows from all tokens up to its end.

    Equal numbers mean equal prefixes but for a chance of 2^-61.
    """
    digest, digests = hash(namespace), list[Hashable]()
    for begin in range(0, len(tokens) // page * page, page):
        digest = hash((digest, *tokens[begin : begin + page]))
        digests.append(digest)
    return digests
