"""The scores of one prompt, gathered layer by layer while it is prefilled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_kvc.policy.base import LayerContext, ModelFacts, apportioner, scorer
from sgl_kvc.policy.selection import Selection, select
from sgl_kvc.spec import CompressionSpec, Extent


class PromptScores:
    """From a prompt's first prefill chunk to what its heads keep.

    Parameters
    ----------
    spec : the request's knob.
    extent : what of the prompt is scored, and how many blocks the kept KVs fill.
    tokens : token ids of the whole prompt.
    page_size : tokens of a block.
    layers : layers this rank holds.
    states : what the scorer's ``observe`` returned for this very prompt before, by layer; the
        prompt need not be prefilled from its beginning then.

    Attributes
    ----------
    states : what a scorer with ``observe`` has gathered, by layer.
    """

    def __init__(
        self,
        spec: CompressionSpec,
        extent: Extent,
        tokens: Sequence[int],
        page_size: int,
        layers: int,
        facts: ModelFacts | None = None,
        states: list[Any] | None = None,
    ):
        self.spec = spec
        self.extent = extent
        self._page_size = page_size
        self._tokens = torch.tensor(tokens[: extent.scored], dtype=torch.int64)
        self._facts = facts or ModelFacts()
        self._scorer, self._apportioner = scorer(spec), apportioner(spec)
        self._scores: list[torch.Tensor | None] = [None] * layers
        self._statistics: list[torch.Tensor | None] = [None] * layers
        self._windows = QueryWindows()
        self.states: list[Any] = states or [None] * layers
        self._observe = None if states else self._scorer.observe
        self._selection: Selection | None = None

    def observe(
        self,
        layer: int,
        queries: torch.Tensor,
        done: int,
        read: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        scale: float,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Look at one layer of a chunk; after the last one the layer is scored.

        Parameters
        ----------
        queries : [t, H*G, D], the chunk's.
        done : tokens up to the chunk's end.
        read : gives their keys [done, H, D] and values [done, H, Dv]. Not called for a chunk
            whose queries need only be remembered, or a long prompt would be read once a chunk.
        scale : factor on the logits.
        lse : float32 [t, H*G], natural log-sum-exp of every query's logits, if known.
        """
        if done > self.extent.scored:
            return  # the question
        window, window_lse = self._windows.last(self.spec.window, layer, queries, lse)
        if done < self.extent.scored:
            self._windows.keep(layer, window, window_lse)
            if self._observe is None:
                return
        keys, values = read()
        self._tokens = self._tokens.to(keys.device, non_blocking=True)  # once
        context = LayerContext(
            layer=layer,
            layers=len(self._scores),
            queries=queries,
            keys=keys,
            values=values,
            scale=scale,
            spec=self.spec,
            tokens=self._tokens[:done],
            kept=self.extent.segment_blocks * self._page_size,
            facts=self._facts,
            state=self.states[layer],
            lse=lse,
            last_chunk=done == self.extent.scored,
        )
        if self._observe is not None:
            self.states[layer] = self._observe(context)
        if done < self.extent.scored:
            return
        previous = self._scores[layer - 1] if layer else None
        context = dataclasses.replace(
            context, queries=window, lse=window_lse, state=self.states[layer], previous=previous
        )
        scores = self._scores[layer] = self._scorer.run(context)
        if self._apportioner.observe is not None:
            context = dataclasses.replace(context, scores=scores)
            self._statistics[layer] = self._apportioner.observe(context)
        self._windows.pop(layer, None)

    @property
    def complete(self) -> bool:
        """Whether every layer was scored."""
        return self._selection is not None or all(layer is not None for layer in self._scores)

    def settle(self) -> None:
        """Choose now what will be kept, and let go of the scores, which take more memory."""
        selection = self.select()
        self._selection = dataclasses.replace(selection, positions=selection.positions.int())
        self._scores, self._statistics, self.states = [], [], []

    def scores(self) -> torch.Tensor:
        """float32 [L, H, scored]. Raises RuntimeError while a layer is missing."""
        found = [layer for layer in self._scores if layer is not None]
        if len(found) < len(self._scores):
            raise RuntimeError("scores asked for before every layer was observed")
        return torch.stack(found).float()

    def select(self) -> Selection:
        """What the heads keep of [begin, end). Raises RuntimeError while a layer is missing.

        Positions count from the prompt's first token.
        """
        if self._selection is not None:
            positions = self._selection.positions.long()
            return dataclasses.replace(self._selection, positions=positions)
        extent, observed = self.extent, self._apportioner.observe is not None
        statistics = [each for each in self._statistics if each is not None]
        selection = select(
            self.scores()[..., extent.begin : extent.end].contiguous(),
            self.spec,
            extent.segment_blocks,
            self._page_size,
            tail=extent.scored - extent.end,
            before=extent.begin,
            statistics=torch.stack(statistics) if observed else None,
            facts=self._facts,
        )
        return dataclasses.replace(selection, positions=selection.positions + extent.begin)


class QueryWindows(dict[int, tuple[torch.Tensor, torch.Tensor | None]]):
    """By layer the last queries of a prompt that comes in chunks; their log-sum-exp if known."""

    def last(
        self, window: int, layer: int, queries: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last `window` up to here: [w, H*G, D], and [w, H*G] if all are known."""
        if layer in self:
            earlier, earlier_lse = self[layer]
            queries = torch.cat([earlier, queries])
            if lse is not None:
                lse = None if earlier_lse is None else torch.cat([earlier_lse, lse])
        return queries[-window:], None if lse is None else lse[-window:]

    def keep(self, layer: int, queries: torch.Tensor, lse: torch.Tensor | None) -> None:
        """For the next chunk; not as views of a whole chunk."""
        self[layer] = queries.clone(), None if lse is None else lse.clone()
