"""What a response tells about its request's compression (docs/http.md)."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class BlockSize:
    """The pool's unit: tokens a block holds per head, and bytes it takes over all heads."""

    tokens: int
    bytes: int


def uncompressed(prompt_tokens: int, block: BlockSize, skipped: str | None) -> dict[str, Any]:
    """The report of a request served uncompressed; `skipped` says why, None if not asked."""
    blocks = -(-prompt_tokens // block.tokens)
    kept = {"mean": float(prompt_tokens), "min": prompt_tokens, "max": prompt_tokens}
    return _report(None, 1.0, prompt_tokens, kept, blocks, blocks, block, skipped)


def compressed(
    policy: str,
    asked_rate: float | None,
    prompt_tokens: int,
    tail_begin: int,
    pages: list[int],
    block: BlockSize,
) -> dict[str, Any]:
    """The report of a compressed request.

    Parameters
    ----------
    asked_rate : None when a budget was asked for.
    tail_begin : the position S; positions from there on are all kept.
    pages : whole pages each head keeps of the positions before S.
    """
    tail = prompt_tokens - tail_begin
    tail_blocks = -(-tail // block.tokens)
    segment_blocks = sum(pages) // len(pages)
    kept = {
        "mean": sum(pages) / len(pages) * block.tokens + tail,
        "min": min(pages) * block.tokens + tail,
        "max": max(pages) * block.tokens + tail,
    }
    before = tail_begin // block.tokens + tail_blocks
    after = segment_blocks + tail_blocks
    return _report(policy, asked_rate, prompt_tokens, kept, before, after, block, None)


def _report(
    policy: str | None,
    rate: float | None,
    prompt_tokens: int,
    kept: dict[str, Any],
    before: int,
    after: int,
    block: BlockSize,
    skipped: str | None,
) -> dict[str, Any]:
    return {
        "policy": policy,
        "rate": rate,
        "rate_achieved": round(prompt_tokens / kept["mean"], 3) if kept["mean"] else 1.0,
        "prompt_tokens": prompt_tokens,
        "kept_per_head": kept,
        "blocks": {"before": before, "after": after},
        "bytes": {"before": before * block.bytes, "after": after * block.bytes},
        "skipped": skipped,
    }
