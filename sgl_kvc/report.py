"""What a response tells about its request's compression (docs/http.md)."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from typing import Any

from sgl_kvc.pool.host_copy import HostCopy


@dataclasses.dataclass(frozen=True)
class BlockSize:
    """The pool's unit: tokens a block holds per head, and bytes it takes over all heads."""

    tokens: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Kept:
    """KVs that heads keep of a prompt.

    Attributes
    ----------
    always : that every head keeps: those before and behind what was compressed.
    mean : mean KVs of a head, those included.
    page_bounds : the fewest and the most pages of a head, besides; they may still be on their way
        from the device. None where all heads keep the same.
    """

    always: int
    mean: int
    page_bounds: HostCopy | None = None

    def to_json(self, page_size: int) -> dict[str, Any]:
        """``mean``, ``min`` and ``max``; waits for the bounds."""
        low, high = (self.mean,) * 2
        if self.page_bounds is not None:
            low, high = (self.always + n * page_size for n in self.page_bounds.tolist())
        return {"mean": float(self.mean), "min": low, "max": high}


#: A bitmap of more bits is not reported: 512 KiB before they are compressed.
MAX_BITS = 1 << 22


@dataclasses.dataclass(frozen=True)
class KeptByHead:
    """Which KVs every head kept of a prompt, for a knob with ``explain``.

    Attributes
    ----------
    layers, heads : of this rank.
    begin, end : positions that heads chose among; they keep all before and behind.
    pages : whole pages of every head in [begin, end); may be on their way from the device.
    bitmap : `Selection.bitmap`, likewise; None where it would be too large.
    """

    layers: int
    heads: int
    begin: int
    end: int
    pages: HostCopy
    bitmap: HostCopy | None

    def to_json(self, page_size: int) -> dict[str, Any]:
        """Counts of `pages` in KVs, and the bitmap as zlib and base64; waits for both."""
        found: dict[str, Any] = {
            "layers": self.layers,
            "heads": self.heads,
            "begin": self.begin,
            "end": self.end,
            "kept": [pages * page_size for pages in self.pages.tolist()],
            "positions": None,
            "skipped": None,
        }
        if self.bitmap is not None:
            found["positions"] = base64.b64encode(zlib.compress(self.bitmap.tobytes(), 1)).decode()
        else:
            bits = self.layers * self.heads * (self.end - self.begin)
            found["skipped"] = (
                f"positions are told up to {MAX_BITS} bits; {self.layers} layers, {self.heads} "
                f"heads and {self.end - self.begin} tokens are {bits}"
            )
        return found


@dataclasses.dataclass
class BoundedPrefill:
    """What a prompt held that was compressed while it came in.

    Attributes
    ----------
    block : tokens after which it was.
    compressed : times that it was, the last time included.
    blocks_peak : the most blocks that it held, besides those that others read too.
    """

    block: int
    compressed: int = 0
    blocks_peak: int = 0


@dataclasses.dataclass
class Report:
    """One request's report. Blocks are those of the prompt.

    Attributes
    ----------
    policy, rate : what was asked for; rate is None for a budget, 1 for an uncompressed request.
    before : blocks the prompt takes uncompressed.
    own : blocks the request holds by itself.
    shared : canonical blocks that it reads and other requests may read too.
    skipped : why it was not compressed; None if it was, or was not to be.
    recompressed : times it was compressed again while decoding; None if that was not asked for.
    pinned : the name of the segment that the request has pinned, None if it has none.
    begun : tokens of the compressed turn that the request began with; None if it began with none.
    kept_per_head_peak : the most KVs a head held on average meanwhile.
    explain : which KVs every head kept, if that was asked for.
    bounded : of a prompt that was compressed while it came in; else None.
    on_pressure : the rate at which it is compressed if memory is short; None where that was not
        asked for.
    """

    prompt_tokens: int
    block: BlockSize
    kept: Kept
    before: int
    own: int
    shared: int = 0
    policy: str | None = None
    rate: float | None = 1.0
    skipped: str | None = None
    recompressed: int | None = None
    kept_per_head_peak: int = 0
    pinned: str | None = None
    explain: KeptByHead | None = None
    begun: int | None = None
    on_pressure: float | None = None
    bounded: BoundedPrefill | None = None

    @classmethod
    def uncompressed(
        cls, prompt_tokens: int, block: BlockSize, skipped: str | None = None
    ) -> Report:
        """Of a request that holds its whole prompt."""
        blocks = -(-prompt_tokens // block.tokens)
        kept = Kept(prompt_tokens, prompt_tokens)
        return cls(prompt_tokens, block, kept, blocks, blocks, skipped=skipped)

    def note_peak(self, kept: int) -> None:
        """Update the peak of mean KVs per head; call just before KVs are freed."""
        self.recompressed = self.recompressed or 0
        self.kept_per_head_peak = max(self.kept_per_head_peak, kept)

    def to_json(self) -> dict[str, Any]:
        """The whole report; waits for numbers that are on their way from the device."""
        kept = self.kept.to_json(self.block.tokens)
        blocks = {"before": self.before, "after": self.own, "shared": self.shared}
        found: dict[str, Any] = {
            "policy": self.policy,
            "rate": self.rate,
            "rate_achieved": round(self.prompt_tokens / kept["mean"], 3) if kept["mean"] else 1.0,
            "prompt_tokens": self.prompt_tokens,
            "kept_per_head": kept,
            "blocks": blocks,
            "bytes": {name: count * self.block.bytes for name, count in blocks.items()},
            "skipped": self.skipped,
        }
        if self.pinned is not None:
            found["pinned"] = self.pinned
        if self.explain is not None:
            found["explain"] = self.explain.to_json(self.block.tokens)
        if self.begun is not None:
            found["begun_with"] = self.begun
        if self.on_pressure is not None:
            found["on_pressure"] = self.on_pressure
        if self.bounded is not None:
            found["prefill"] = dataclasses.asdict(self.bounded)
        if self.recompressed is not None:
            found["decode"] = {
                "recompressed": self.recompressed,
                "kept_per_head_peak": self.kept_per_head_peak,
            }
        return found
