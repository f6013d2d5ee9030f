"""A prompt on its way to being compressed: from its first prefill chunk to compaction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from sgl_kvc.policy.base import LayerContext, ModelFacts, apportioner, scorer
from sgl_kvc.policy.selection import Selection, select
from sgl_kvc.spec import CompressionSpec, Extent


class Plan:
    """Scores of one prompt, gathered layer by layer while it is prefilled.

    Parameters
    ----------
    spec : the request's knob.
    tokens : token ids of the whole prompt.
    layers : layers this rank holds.
    states : what the scorer's ``observe`` returned for this very prompt before, by layer; the
        prompt need not be prefilled from its beginning then.

    Attributes
    ----------
    prompt_tokens : tokens the prefill will have processed when it is done.
    segment_blocks : blocks the segment will take.
    tail_begin : the position S, where the whole blocks of what is compressed end.
    scored : tokens that are scored. Without a question all of the prompt; else S, and
        compression comes before the question is read.
    states : what a scorer with ``observe`` has gathered, by layer.
    """

    def __init__(
        self,
        spec: CompressionSpec,
        tokens: list[int],
        page_size: int,
        layers: int,
        facts: ModelFacts | None = None,
        states: list[Any] | None = None,
    ):
        self.spec = spec
        self.prompt_tokens = len(tokens)
        extent = Extent.of(spec, len(tokens), page_size)
        self.segment_blocks = extent.segment_blocks
        self.tail_begin, self.scored = extent.end, extent.scored
        self._page_size = page_size
        self._tokens = torch.tensor(tokens[: self.scored], dtype=torch.int64)
        self._facts = facts or ModelFacts()
        self._scorer, self._apportioner = scorer(spec), apportioner(spec)
        self._scores: list[torch.Tensor | None] = [None] * layers
        self._statistics: list[torch.Tensor | None] = [None] * layers
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self.states: list[Any] = states or [None] * layers
        self._observe = None if states else self._scorer.observe

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
        if done > self.scored:
            return  # the question
        window, window_lse = self._window(layer, queries, lse)
        if done < self.scored:
            known = None if window_lse is None else window_lse.clone()
            self._windows[layer] = window.clone(), known  # not views of the whole chunk
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
            kept=self.segment_blocks * self._page_size,
            facts=self._facts,
            state=self.states[layer],
            lse=lse,
        )
        if self._observe is not None:
            self.states[layer] = self._observe(context)
        if done < self.scored:
            return
        context = dataclasses.replace(
            context, queries=window, lse=window_lse, state=self.states[layer]
        )
        self._scores[layer] = self._scorer.run(context)
        if self._apportioner.observe is not None:
            self._statistics[layer] = self._apportioner.observe(context)
        self._windows.pop(layer, None)

    def scores(self) -> torch.Tensor:
        """float32 [L, H, scored]. Raises RuntimeError while a layer is missing."""
        if any(layer is None for layer in self._scores):
            raise RuntimeError("scores asked for before every layer was observed")
        return torch.stack(self._scores).float()

    def select(self) -> Selection:
        """What the heads keep. Raises RuntimeError while a layer is missing."""
        observed = self._apportioner.observe is not None
        return select(
            self.scores()[..., : self.tail_begin].contiguous(),
            self.spec,
            self.segment_blocks,
            self._page_size,
            tail=self.scored - self.tail_begin,
            statistics=torch.stack(self._statistics) if observed else None,
            facts=self._facts,
        )

    def _window(
        self, layer: int, queries: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The last queries up to here, and their log-sum-exp if all are known."""
        last = slice(-self.spec.window, None)
        if layer in self._windows:
            earlier, earlier_lse = self._windows[layer]
            queries = torch.cat([earlier, queries])
            both = lse is not None and earlier_lse is not None
            lse = torch.cat([earlier_lse, lse]) if both else None
        return queries[last], None if lse is None else lse[last]
