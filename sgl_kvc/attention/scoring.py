"""The prompts of one forward that will be compressed, scored layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from sgl_kvc.cache.request import Request
from sgl_kvc.policy.scores import PromptScores, score_together

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

    from sgl_kvc.pool.arena import ArenaKVPool


class PromptScoring:
    """Lets the scores of every prompt in a batch see a layer of its chunk.

    Parameters
    ----------
    pool : where KVs lie.
    req_to_token : the slots of every request row.
    batch : of every request in order: what is known of it, tokens before the chunk, and in it.
    """

    def __init__(
        self,
        pool: ArenaKVPool,
        req_to_token: torch.Tensor,
        batch: Iterable[tuple[Request | None, int, int]],
    ):
        self._pool, self._prompts, first = pool, [], 0
        self._tables: dict[Any, torch.Tensor] = {}
        for request, before, new in batch:
            if request is not None and request.scores is not None:
                slots = req_to_token[request.row, : before + new]
                self._prompts.append((request, slice(first, first + new), slots))
            first += new

    def observe(
        self, query: torch.Tensor, lse: torch.Tensor | None, layer: RadixAttention
    ) -> None:
        """A layer's queries [t, Hq, D] are there, and its KVs are stored.

        Parameters
        ----------
        lse : float32 [t, Hq], natural log-sum-exp of every query's logits; None if unknown.
        """
        found = []
        for request, mine, slots in self._prompts:
            scores = request.scores
            if scores is None:
                continue
            kvs = self._pool.prompt(layer.layer_id, slots)
            known = None if lse is None else lse[mine]
            local = layer.layer_id - self._pool.start_layer
            context = scores.look(local, query[mine], kvs, layer.scaling, known)
            if context is not None:
                assert isinstance(scores, PromptScores)
                found.append((scores, context))
        score_together(found, self._tables)
