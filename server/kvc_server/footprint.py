"""How many blocks of the KV pool a request takes, known before it runs.

It follows from the knob and from the lengths of prompt and answer: `sgl_kvc.spec.Extent` is the
rule by which the engine itself compresses. A block that several requests read counts once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence

from sgl_kvc.spec import CompressionSpec, Extent

Shared = Mapping[Hashable, int]


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Blocks of the pool that a request takes.

    Attributes
    ----------
    own : held by it alone when its last token is decoded.
    shared : held once by all requests that name them: what it is to how many blocks.
    prefill : needed besides while its prompt is prefilled, for KVs that compression frees.
    """

    own: int
    shared: Shared = dataclasses.field(default_factory=dict)
    prefill: int = 0


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt of a request, with its choices.

    Attributes
    ----------
    length, answer : tokens; of the answer as many as there may be.
    choices : answers to it.
    digests : of each of its whole blocks, what stands for all tokens up to its end
        (`sgl_kvc.spec.chained_digests`); empty where the tokens are not known, so that nothing
        counts as shared.
    """

    spec: CompressionSpec
    length: int
    answer: int
    choices: int = 1
    digests: Sequence[Hashable] = ()

    def footprint(self, page_size: int, rate: float | None = None) -> Footprint:
        """What it takes at its own rate, or at another.

        Prompts compressed again in decode are bounded by the last segment and the tail before it.
        """
        spec = self.spec if rate is None else dataclasses.replace(self.spec, rate=rate)
        extent = Extent.of(spec, self.length, page_size)
        total = self.length + self.answer
        if not extent.compressed:
            whole = self.length // page_size
            own = self.choices * (_blocks(total, page_size) - whole)
            return self._sharing(whole, own)
        begin, segment = extent.begin // page_size, extent.segment_blocks
        tail, prefill = extent.tail_blocks(total), _blocks(self.length, page_size) - begin + segment
        if every := spec.recompress_every:
            last = spec.blocks_for(max(1, total // page_size - begin), page_size)
            segment, tail = max(segment, last), min(tail, _blocks(every + page_size, page_size))
            prefill = max(prefill, 2 * segment + tail)
        if extent.prefill_block:
            prefill = extent.bound - begin
        stored = extent.cut is not None and not every and not spec.explain and bool(self.digests)
        own = self.choices * (tail if stored else segment + tail)
        found = self._sharing(begin, own, max(0, prefill - segment - tail))
        if not stored:
            return found
        what = ("segment", self.digests[extent.end // page_size - 1], extent.begin, spec.shape)
        return dataclasses.replace(found, shared={**found.shared, what: segment})

    def _sharing(self, blocks: int, own: int, prefill: int = 0) -> Footprint:
        """A footprint whose first `blocks` blocks of the prompt may be read by others too."""
        if self.digests:
            return Footprint(own, dict.fromkeys(self.digests[:blocks], 1), prefill)
        return Footprint(blocks + own, {}, prefill)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a request asks of the pool.

    Attributes
    ----------
    max_rate : to which its rate may be raised, so that it need not wait; None leaves it as it is.
    priority : of those that wait, higher ones go first.
    """

    prompts: tuple[Prompt, ...]
    max_rate: float | None = None
    priority: int = 0

    def footprint(self, page_size: int, rate: float | None = None) -> Footprint:
        """What all its prompts take; of their prefills the largest counts, one is prefilled first.

        Parameters
        ----------
        rate : instead of the knob's.
        """
        each = [prompt.footprint(page_size, rate) for prompt in self.prompts]
        shared = {what: size for one in each for what, size in one.shared.items()}
        prefill = max((one.prefill for one in each), default=0)
        return Footprint(sum(one.own for one in each), shared, prefill)

    def raised_rates(self, page_size: int) -> list[float]:
        """Rates above the asked one at which it takes less, ascending, up to `max_rate`."""
        if self.max_rate is None or not self.prompts:
            return []
        longest = max(self.prompts, key=lambda prompt: prompt.length)
        extent = Extent.of(
            dataclasses.replace(longest.spec, rate=self.max_rate), longest.length, page_size
        )
        if not extent.compressed:
            return []
        whole, asked = (extent.end - extent.begin) // page_size, longest.spec.rate
        assert asked is not None  # a budget cannot be raised
        if asked >= self.max_rate:
            return []
        counts = range(math.ceil(whole / asked) - 1, extent.segment_blocks, -1)
        between = [round(whole / (blocks - 0.5), 3) for blocks in counts]  # rounds up to `blocks`
        return [rate for rate in between if asked < rate < self.max_rate] + [self.max_rate]


def _blocks(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
