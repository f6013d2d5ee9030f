"""A prompt on its way to being compressed: from its first prefill chunk to compaction."""

from __future__ import annotations

import torch

from sgl_kvc.policy.base import LayerContext, scorer
from sgl_kvc.spec import CompressionSpec


class Plan:
    """Scores of one prompt, gathered layer by layer while its last chunk is prefilled.

    Parameters
    ----------
    spec : the request's knob.
    prompt_tokens : tokens the prefill will have processed when it is done.
    layers : layers this rank holds.

    Attributes
    ----------
    segment_blocks : blocks the segment will take.
    tail_begin : the position S, where the whole blocks of the prompt end.
    """

    def __init__(self, spec: CompressionSpec, prompt_tokens: int, page_size: int, layers: int):
        self.spec = spec
        self.prompt_tokens = prompt_tokens
        self.segment_blocks = spec.segment_blocks(prompt_tokens, page_size)
        self.tail_begin = prompt_tokens // page_size * page_size
        self._score = scorer(spec.scorer)
        self._scores: list[torch.Tensor | None] = [None] * layers
        self._queries: dict[int, torch.Tensor] = {}

    def keep_queries(self, layer: int, queries: torch.Tensor) -> None:
        """Remember the window's part that a chunk before the last one holds: [t, Hq, D]."""
        self._queries[layer] = self._window(layer, queries).clone()

    def observe(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> None:
        """Score one layer of the whole prompt.

        Parameters
        ----------
        queries : [t, H*G, D], the last chunk's.
        keys, values : [prompt_tokens, H, D] and [prompt_tokens, H, Dv].
        """
        window = self._window(layer, queries)
        context = LayerContext(layer, window, keys, values, scale, self.spec)
        self._scores[layer] = self._score(context)[:, : self.tail_begin]
        self._queries.pop(layer, None)

    def scores(self) -> torch.Tensor:
        """float32 [L, H, S]. Raises RuntimeError while a layer is missing."""
        if any(layer is None for layer in self._scores):
            raise RuntimeError("scores asked for before every layer was observed")
        return torch.stack(self._scores).float()

    def _window(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        earlier = self._queries.get(layer)
        if earlier is not None:
            queries = torch.cat([earlier, queries])
        return queries[-self.spec.window :]
