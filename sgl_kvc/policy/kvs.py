"""Keys and values of a prompt in one layer, copied out of the cache only if they are asked for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class PromptKVs:
    """Of the first ``n`` tokens.

    Attributes
    ----------
    length, heads : n and H.
    device : where they are.
    read_keys, read_values : give [n, H, D] and [n, H, Dv]; called once at most.
    layer_k, slots : the layer of the arena that keys lie in, [num_blocks, H, P, D], and the slot
        of every token, integer [n], for kernels that read them there; None where no kernel does.
    """

    length: int
    heads: int
    device: torch.device
    read_keys: Callable[[], torch.Tensor]
    read_values: Callable[[], torch.Tensor]
    layer_k: torch.Tensor | None = None
    slots: torch.Tensor | None = None

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> PromptKVs:
        """Of keys [n, H, D] and values [n, H, Dv] that are at hand."""
        return cls(len(keys), keys.shape[1], keys.device, lambda: keys, lambda: values)

    @functools.cached_property
    def keys(self) -> torch.Tensor:
        """[n, H, D], rotated."""
        return self.read_keys()

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """[n, H, Dv]."""
        return self.read_values()
