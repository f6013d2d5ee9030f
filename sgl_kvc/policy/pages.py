"""What an apportioner sees: the pages of all heads, ranked by their best score."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from kvc_kernels.select import RankedPages

from sgl_kvc.policy.facts import ModelFacts


@dataclasses.dataclass(frozen=True)
class PagesContext:
    """What an apportioner sees.

    Attributes
    ----------
    ranked : the pages of all heads, one row per (layer, head); those of protected positions are
        above all others.
    layers : L, for so many of which rows stand one after the other.
    total : pages there are to give, a multiple of L * H.
    statistics : float32 [L, K], what the apportioner's ``observe`` said of each layer.
    facts : about the model.
    """

    ranked: RankedPages
    layers: int
    total: int
    statistics: torch.Tensor | None = None
    facts: ModelFacts = dataclasses.field(default_factory=ModelFacts)

    @property
    def heads(self) -> int:
        return len(self.ranked.scores) // self.layers

    @property
    def pages(self) -> int:
        """C, pages that every head has."""
        return self.ranked.pages

    @property
    def mean(self) -> int:
        """Pages a head gets on average."""
        return self.total // (self.layers * self.heads)

    @property
    def device(self) -> torch.device:
        return self.ranked.scores.device

    @property
    def page_scores(self) -> torch.Tensor:
        """float32 [L, H, C], the best score in each page, descending.

        On a GPU this sorts all keys, which takes longer than all the rest of selection:
        ask `above` and `compete` where they will do.
        """
        return self.ranked.page_scores.view(self.layers, self.heads, -1)

    def above(self, score: float) -> torch.Tensor:
        """int64 [L, H], pages whose best key has more than `score`."""
        return self.ranked.above(score).view(self.layers, self.heads)

    def compete(
        self, won: int | torch.Tensor, safe: int | torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """int64 [L, H]: `safe` pages of every head, and the best `won` others of its layer.

        Parameters
        ----------
        won, safe : int64 [L] or the same for all layers.
        how : see `RankedPages.compete`; ``groups=1`` lets all heads of the model compete.
        """
        groups = how.pop("groups", self.layers)
        pages = self.ranked.compete(won, safe, groups, **how)
        return pages.view(self.layers, self.heads)
