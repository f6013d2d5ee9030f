"""From a prompt's scores to the KVs every head keeps."""

from __future__ import annotations

import dataclasses

import torch
from kvc_kernels.select import RankedPages, protect

from sgl_kvc.policy.base import apportioner, forced_recent, scorer
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.pages import PagesContext
from sgl_kvc.spec import CompressionSpec


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is kept of positions [0, S).

    Attributes
    ----------
    pages : int64 [L * H], whole pages of every head.
    positions : int64 [sum(pages) * P], ascending within a head, heads in canonical order.
    """

    pages: torch.Tensor
    positions: torch.Tensor

    def owners(self, page_size: int) -> torch.Tensor:
        """The head of every kept KV: int64 [n]. Nothing waits, for their number is known."""
        heads = torch.arange(len(self.pages), device=self.pages.device)
        return torch.repeat_interleave(
            heads, self.pages * page_size, output_size=len(self.positions)
        )

    def bitmap(self, begin: int, end: int, page_size: int) -> torch.Tensor:
        """Which of the positions [begin, end) each head keeps.

        Returns
        -------
        uint8 [L * H, ceil((end - begin) / 8)].
            Bit ``i % 8`` of byte ``i // 8``, from the lowest, is position ``begin + i``.
        """
        device, heads, head = self.pages.device, len(self.pages), self.owners(page_size)
        kept = torch.zeros(heads, -(-(end - begin) // 8) * 8, dtype=torch.uint8, device=device)
        kept[head, self.positions - begin] = 1
        bits = torch.arange(8, dtype=torch.uint8, device=device)
        return (kept.view(heads, -1, 8) << bits).sum(-1, dtype=torch.uint8)


def select(
    scores: torch.Tensor,
    spec: CompressionSpec,
    segment_blocks: int,
    page_size: int,
    *,
    tail: int = 0,
    before: int = 0,
    begin: int = 0,
    first: torch.Tensor | None = None,
    statistics: torch.Tensor | None = None,
    facts: ModelFacts | None = None,
) -> Selection:
    """Choose what fills `segment_blocks` blocks (arXiv 2410.00161, algorithm 1).

    Parameters
    ----------
    scores : float32 [L, H, S]; S is a multiple of `page_size`. Overwritten.
    segment_blocks : whole blocks the segment gets, at most S / page_size.
    tail : tokens of what is compressed that lie behind S; they are kept in any case, and are
        the last of the `spec.recent` that are protected (no more than `forced_recent` says).
    before : KVs that are kept in any case and lie before the scored ones; they are the first of
        the `spec.sinks` that are protected.
    begin : the first score's position, from which those in the result count.
    first : int64 [L * H], where each head's KVs begin, a multiple of `page_size`; scores before
        it are -inf and never chosen. None is zeros.
    statistics : float32 [L, K] for the apportioner (`PagesContext`).
    """
    layers, heads, total = scores.shape
    kept = segment_blocks * page_size
    lift = scorer(spec).lift
    if lift is not None:
        lift(scores, kept, tail)
    recent = forced_recent(spec.recent, kept)
    protect(scores, max(0, spec.sinks - before), recent - tail, first)
    ranked = RankedPages(scores.view(layers * heads, total), page_size)
    give = segment_blocks * layers * heads
    context = PagesContext(ranked, layers, give, statistics, facts or ModelFacts())
    pages = apportioner(spec).run(context).flatten()
    return Selection(pages, ranked.kept_positions(pages, give, begin))

