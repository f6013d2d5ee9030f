"""The scores of one prompt, gathered layer by layer while it is prefilled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from kvc_kernels.score import window_scores
from kvc_kernels.windows import WindowOptions

from sgl_kvc.policy.base import LayerContext, apportioner, scorer
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
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
        self._of_kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def observe(
        self,
        layer: int,
        queries: torch.Tensor,
        kvs: PromptKVs,
        scale: float,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Look at one layer of a chunk; after the last one the layer is scored.

        See `look`; without other prompts.
        """
        context = self.look(layer, queries, kvs, scale, lse)
        if context is not None:
            self.score(context)

    def look(
        self,
        layer: int,
        queries: torch.Tensor,
        kvs: PromptKVs,
        scale: float,
        lse: torch.Tensor | None = None,
    ) -> LayerContext | None:
        """Look at one layer of a chunk.

        Parameters
        ----------
        queries : [t, H*G, D], the chunk's.
        kvs : up to the chunk's end. Not asked for keys by a chunk whose queries need only be
            remembered, or a long prompt would be read once a chunk.
        scale : factor on the logits.
        lse : float32 [t, H*G], natural log-sum-exp of every query's logits, if known.

        Returns
        -------
        context : for `score`, after the last chunk.
        """
        done = kvs.length
        if done > self.extent.scored:
            return None  # the question
        window, window_lse = self._windows.last(self.spec.window, layer, queries, lse)
        if done < self.extent.scored:
            self._windows.keep(layer, window, window_lse)
            if self._observe is None:
                return None
        self._tokens = self._tokens.to(kvs.device, non_blocking=True)  # once
        context = LayerContext(
            layer=layer,
            layers=len(self._scores),
            queries=queries,
            kvs=kvs,
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
            return None
        previous = self._scores[layer - 1] if layer else None
        return dataclasses.replace(
            context, queries=window, lse=window_lse, state=self.states[layer], previous=previous
        )

    def score(self, context: LayerContext) -> None:
        """Score a layer of which every chunk was looked at."""
        layer = context.layer
        scores = self._scores[layer] = self._scorer.run(context)
        if self._apportioner.observe is not None:
            context = dataclasses.replace(context, scores=scores)
            self._statistics[layer] = self._apportioner.observe(context)
        self._windows.pop(layer, None)

    @property
    def complete(self) -> bool:
        """Whether every layer was scored."""
        return self._selection is not None or all(layer is not None for layer in self._scores)

    def settle(self, *, with_scores: bool) -> None:
        """Choose now what will be kept, and let go of the other scores, which take more memory.

        Parameters
        ----------
        with_scores : whether `scores_of` will be asked for.
        """
        selection = self.select()
        self._of_kept = self.scores_of(selection) if with_scores else None
        self._selection = dataclasses.replace(selection, positions=selection.positions.int())
        self._scores, self._statistics, self.states = [], [], []

    def scores(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """float32 [L, H, scored], or of [begin, end): a copy.

        Raises RuntimeError while a layer is missing.
        """
        found = [layer[:, begin:end] for layer in self._scores if layer is not None]
        if len(found) < len(self._scores):
            raise RuntimeError("scores asked for before every layer was observed")
        return torch.stack(found).float()

    def scores_of(self, selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of what `select` has chosen, and of what is kept behind it in any case.

        Returns
        -------
        float32 [n] as `Selection.positions`, and [L, H, scored - end].
        """
        if self._of_kept is not None:
            return self._of_kept
        scores, head = self.scores(), selection.owners(self._page_size)
        behind = scores[..., self.extent.end :].clone()
        return scores.flatten(0, 1)[head, selection.positions], behind

    def select(self) -> Selection:
        """What the heads keep of [begin, end). Raises RuntimeError while a layer is missing.

        Positions count from the prompt's first token.
        """
        if self._selection is not None:
            positions = self._selection.positions.long()
            return dataclasses.replace(self._selection, positions=positions)
        extent, observed = self.extent, self._apportioner.observe is not None
        statistics = [each for each in self._statistics if each is not None]
        return select(
            self.scores(extent.begin, extent.end),
            self.spec,
            extent.segment_blocks,
            self._page_size,
            tail=extent.scored - extent.end,
            before=extent.begin,
            begin=extent.begin,
            statistics=torch.stack(statistics) if observed else None,
            facts=self._facts,
        )


def score_together(
    prompts: Sequence[tuple[PromptScores, LayerContext]], tables: dict[Any, torch.Tensor]
) -> None:
    """Score a layer of prompts of a batch; those of the same scorer ask for attention at once.

    Parameters
    ----------
    prompts : and what they made of their last chunks; of the same layer.
    tables : empty at first, the same for all layers of the batch (`kvc_kernels.score`).
    """
    groups: dict[Any, list[LayerContext]] = {}
    for _, context in prompts:
        groups.setdefault(_asks(context), []).append(context)
    shared = {key: SharedAttention(group, tables) for key, group in groups.items()}
    for scores, context in prompts:
        if context.kvs.layer_k is not None:
            together = functools.partial(shared[_asks(context)].attention, id(context))
            context = dataclasses.replace(context, together=together)
        scores.score(context)


def _asks(context: LayerContext) -> Any:
    """What prompts have in common that ask for the same attention."""
    return context.spec.scorer, tuple(sorted(context.spec.parameters.items()))


class SharedAttention:
    """Window attention of several prompts in one layer, computed when the first asks for its own.

    Parameters
    ----------
    contexts : theirs; their scorers ask for the same.
    tables : see `score_together`.
    """

    def __init__(self, contexts: Sequence[LayerContext], tables: dict[Any, torch.Tensor]):
        self._contexts, self._tables = contexts, tables
        self._found: dict[WindowOptions, dict[int, torch.Tensor]] = {}

    def attention(self, prompt: int, how: WindowOptions) -> torch.Tensor:
        """float32 [H, n], that of the context of this id; the caller may change it."""
        found = self._found.setdefault(how, {})
        if prompt not in found:
            first, windows = self._contexts[0], [each.window for each in self._contexts]
            assert first.kvs.layer_k is not None
            scores = window_scores(windows, first.kvs.layer_k, first.scale, how, self._tables)
            found.update(zip(map(id, self._contexts), scores, strict=True))
        return found.pop(prompt)


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
