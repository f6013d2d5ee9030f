"""The scores of what a request holds whose heads hold different KVs.

Of a chat's next turn, and of a prompt that is compressed while it comes in: queries look at what
was kept before and at the new tokens, head by head, since heads hold different numbers. Policies
see each head as a prompt of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from kvc_kernels.pages import page_ids

from sgl_kvc.policy.base import LayerContext, scorer
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.scores import QueryWindows
from sgl_kvc.policy.selection import Selection
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.segment import Segment
from sgl_kvc.spec import CompressionSpec


@dataclasses.dataclass(frozen=True)
class Carried:
    """What a scorer that looks at every query has said of KVs that were kept since.

    Attributes
    ----------
    states : by layer and head, before.
    segment, selection : what was kept then, positions of a rectangle (`repack`).
    first : int64 [L * H], where each head's KVs begin in it.
    """

    states: list[Any]
    segment: Segment
    selection: Selection
    first: torch.Tensor

    def states_of_kept(self, keep: Callable[[Any, torch.Tensor], Any]) -> list[Any]:
        """By layer and head, what is left of the states; waits for what was kept."""
        begin, page = self.segment.begin, self.segment.page_size
        counts = [pages * page for pages in self.segment.page_counts.tolist()]
        ends = itertools.accumulate(counts)
        before = torch.arange(begin, device=self.first.device)
        found = []
        for state, first, count, end in zip(self.states, self.first, counts, ends, strict=True):
            kept = self.selection.positions[end - count : end] - first + begin
            found.append(keep(state, torch.cat([before, kept])))
        return found


class HeldScores:
    """From the first chunk that is prefilled behind a segment to what its heads keep.

    Parameters
    ----------
    pool : whose spans say where the heads' KVs lie.
    row : the request's.
    segment : what it began with, installed in the row.
    end, scored : up to where it will be compressed, and scored; `scored` is less than a block
        behind `end`.
    kept : KVs that a head will keep on average.
    carried : what is known of the segment's KVs; None if nothing is.

    Attributes
    ----------
    states : nothing that other requests could use.
    """

    states: list[Any]

    def __init__(
        self,
        pool: ArenaKVPool,
        row: int,
        segment: Segment,
        spec: CompressionSpec,
        end: int,
        scored: int,
        kept: int,
        carried: Carried | None = None,
    ):
        self._pool, self._row, self._segment = pool, row, segment
        self._spec, self._end, self._scored, self._kept = spec, end, scored, kept
        self._scorer = scorer(spec)
        self._windows = QueryWindows()
        self._scores: list[list[torch.Tensor] | None] = [None] * pool.layer_num
        self._carried = carried
        self._by_head: list[Any] = [None] * (pool.layer_num * pool.head_num)
        self.states = []

    def look(
        self,
        layer: int,
        queries: torch.Tensor,
        kvs: PromptKVs,
        scale: float,
        lse: torch.Tensor | None = None,
    ) -> LayerContext | None:
        """As `PromptScores.look`, and scores at once; `kvs` would be of a prompt nobody holds."""
        done = kvs.length
        if done > self._scored:
            return None  # the question
        if self._scorer.observe is not None:
            self._observe(layer, queries, lse, done, scale)
        window, window_lse = self._windows.last(self._spec.window, layer, queries, lse)
        if done < self._scored:
            self._windows.keep(layer, window, window_lse)
            return None
        self._scores[layer] = [
            self._scorer.run(context)[0].float()
            for context in self._contexts(layer, window, window_lse, done, scale)
        ]
        self._windows.pop(layer, None)
        return None

    @property
    def complete(self) -> bool:
        """Whether every layer was scored."""
        return all(layer is not None for layer in self._scores)

    def rectangle(self, columns: int) -> torch.Tensor:
        """float32 [L, H, columns] up to `end`, each head's at the end, -inf before.

        Without what precedes the segment.
        """
        behind, before = self._scored - self._end, self._segment.begin
        found = []
        for layer in self._scores:
            assert layer is not None
            for scores in layer:
                mine = scores[before : len(scores) - behind]
                found.append(
                    torch.nn.functional.pad(mine, (columns - len(mine), 0), value=-torch.inf)
                )
        return torch.stack(found).view(len(self._scores), -1, columns)

    def carry(self, segment: Segment, selection: Selection, first: torch.Tensor) -> Carried | None:
        """What goes on being known once `segment` is all that is left (`Carried`)."""
        if self._scorer.keep is None:
            return None
        return Carried(self._by_head, segment, selection, first)

    def _observe(
        self,
        layer: int,
        queries: torch.Tensor,
        lse: torch.Tensor | None,
        done: int,
        scale: float,
    ) -> None:
        """Let a scorer that looks at every query see a chunk, head by head."""
        assert self._scorer.observe is not None
        if self._carried is not None:
            assert self._scorer.keep is not None
            self._by_head = self._carried.states_of_kept(self._scorer.keep)
            self._carried = None
        for context in self._contexts(layer, queries, lse, done, scale):
            assert context.head is not None
            state = self._scorer.observe(context)
            self._by_head[layer * self._pool.head_num + context.head] = state

    def _contexts(
        self,
        layer: int,
        queries: torch.Tensor,
        lse: torch.Tensor | None,
        done: int,
        scale: float,
    ) -> list[LayerContext]:
        """What a policy sees of every head: all KVs that it holds up to `done`, by position."""
        heads = self._pool.head_num
        known = [None] * heads if lse is None else lse.chunk(heads, dim=1)
        per_head = zip(queries.chunk(heads, dim=1), known, strict=True)
        return [
            self._context(layer, head, mine, mine_lse, done, scale)
            for head, (mine, mine_lse) in enumerate(per_head)
        ]

    def _context(
        self,
        layer: int,
        head: int,
        queries: torch.Tensor,
        lse: torch.Tensor | None,
        done: int,
        scale: float,
    ) -> LayerContext:
        pool, page, segment = self._pool, self._pool.page_size, self._segment
        layer_head = layer * pool.head_num + head
        held = segment.begin + segment.page_counts.tolist()[layer_head] * page + done - segment.end
        nth = torch.arange(-(-held // page), device=pool.arena_k.device)
        keys, values = pool.read_head(page_ids(pool.cache, self._row, layer_head, nth))
        return LayerContext(
            layer=layer,
            layers=len(self._scores),
            queries=queries,
            kvs=PromptKVs.of(keys[:held, None], values[:held, None]),
            scale=scale,
            spec=self._spec,
            tokens=nth[:0],  # whose they are is not known
            kept=self._kept,
            facts=pool.facts,
            state=self._by_head[layer_head],
            lse=lse,
            last_chunk=done == self._scored,
            head=head,
        )
