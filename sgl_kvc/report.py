"""What a response tells about its request's compression (docs/http.md)."""

from __future__ import annotations

import dataclasses
from typing import Any

from sgl_kvc.pool.host_copy import HostCopy


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
    segment_blocks: int,
    block: BlockSize,
) -> dict[str, Any]:
    """The report of a compressed request, but for the least and the most that a head kept.

    Parameters
    ----------
    asked_rate : None when a budget was asked for.
    tail_begin : the position S; positions from there on are all kept.
    """
    tail = prompt_tokens - tail_begin
    tail_blocks = -(-tail // block.tokens)
    kept = {"mean": float(segment_blocks * block.tokens + tail), "min": None, "max": None}
    before = tail_begin // block.tokens + tail_blocks
    after = segment_blocks + tail_blocks
    return _report(policy, asked_rate, prompt_tokens, kept, before, after, block, None)


@dataclasses.dataclass(frozen=True)
class KeptPerHead:
    """The least and the most that a head keeps, where the host may not know yet.

    Attributes
    ----------
    pages : the least and the most whole pages of a head.
    page_size, tail : tokens of a page, and those behind the pages.
    """

    pages: HostCopy
    page_size: int
    tail: int

    def bounds(self) -> dict[str, int]:
        """``min`` and ``max``; waits for them."""
        least, most = self.pages.tolist()
        return {
            "min": least * self.page_size + self.tail,
            "max": most * self.page_size + self.tail,
        }


def of(req) -> dict[str, Any] | None:
    """The whole report of an SGLang request, None if it has none yet."""
    report, kept = getattr(req, "kvc_report", None), getattr(req, "kvc_kept", None)
    if kept is not None:
        req.kvc_kept = None
        report["kept_per_head"] |= kept.bounds()
    return report


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
