"""The scores of what a request holds whose heads hold different KVs: a chat's next turn.

The turn's last queries look at what the turns before have left and at the new tokens, head by
head, since heads hold different numbers. Policies see each head as a prompt of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from kvc_kernels.pages import page_ids

from sgl_kvc.policy.base import LayerContext, scorer
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.scores import QueryWindows
from sgl_kvc.pool.arena import ArenaKVPool
from sgl_kvc.pool.segment import Segment
from sgl_kvc.spec import CompressionSpec, Extent


class HeldScores:
    """From the first chunk that is prefilled behind a stored segment to what its heads keep.

    Parameters
    ----------
    pool : whose spans say where the heads' KVs lie.
    row : the request's.
    segment : what it began with.
    extent : what will be compressed of its prompt, the segment included.

    Attributes
    ----------
    states : nothing; scorers that gather any look at every query.
    """

    states: list[Any]

    def __init__(
        self,
        pool: ArenaKVPool,
        row: int,
        segment: Segment,
        spec: CompressionSpec,
        extent: Extent,
    ):
        self._pool, self._row, self._segment = pool, row, segment
        self._spec, self._extent = spec, extent
        self._scorer = scorer(spec)
        self._windows = QueryWindows()
        self._scores: list[list[torch.Tensor] | None] = [None] * pool.layer_num
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
        window, window_lse = self._windows.last(self._spec.window, layer, queries, lse)
        if done < self._extent.scored:
            self._windows.keep(layer, window, window_lse)
            return None
        heads = self._pool.head_num
        per_head = zip(
            window.chunk(heads, dim=1),
            [None] * heads if window_lse is None else window_lse.chunk(heads, dim=1),
            strict=True,
        )
        self._scores[layer] = [
            self._score(layer, head, mine, mine_lse, done, scale)
            for head, (mine, mine_lse) in enumerate(per_head)
        ]
        self._windows.pop(layer, None)
        return None

    @property
    def complete(self) -> bool:
        """Whether every layer was scored."""
        return all(layer is not None for layer in self._scores)

    def rectangle(self, columns: int) -> torch.Tensor:
        """float32 [L, H, columns] up to the extent's end, each head's at the end, -inf before.

        Without what precedes the segment.
        """
        behind = self._extent.scored - self._extent.end
        before = self._segment.begin
        found = []
        for layer in self._scores:
            assert layer is not None
            for scores in layer:
                mine = scores[before : len(scores) - behind]
                found.append(
                    torch.nn.functional.pad(mine, (columns - len(mine), 0), value=-torch.inf)
                )
        return torch.stack(found).view(len(self._scores), -1, columns)

    def _score(
        self,
        layer: int,
        head: int,
        queries: torch.Tensor,
        lse: torch.Tensor | None,
        done: int,
        scale: float,
    ) -> torch.Tensor:
        """float32 [n], of all KVs that one head holds up to `done`, in the order of positions."""
        pool, page, segment = self._pool, self._pool.page_size, self._segment
        layer_head = layer * pool.head_num + head
        held = segment.begin + segment.page_counts.tolist()[layer_head] * page + done - segment.end
        nth = torch.arange(-(-held // page), device=pool.arena_k.device)
        keys, values = pool.read_head(page_ids(pool.cache, self._row, layer_head, nth))
        context = LayerContext(
            layer=layer,
            layers=len(self._scores),
            queries=queries,
            kvs=PromptKVs.of(keys[:held, None], values[:held, None]),
            scale=scale,
            spec=self._spec,
            tokens=nth[:0],  # whose they are is not known
            kept=self._extent.segment_blocks * page,
            facts=pool.facts,
            lse=lse,
        )
        return self._scorer.run(context)[0].float()
