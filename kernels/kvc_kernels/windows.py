"""The last queries of a prompt, asked of its keys where these lie in the arena."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """Of one prompt in one layer.

    Attributes
    ----------
    queries : [w, H*G, D], of the last w of n positions; query i sees keys up to n - w + i.
    slots : integer [n], the slot (``block * P + offset``) of every position.
    lse : float32 [w, H*G], natural log-sum-exp of every query's logits; None where unknown.
    """

    queries: torch.Tensor
    slots: torch.Tensor
    lse: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class WindowOptions:
    """What keys get from the queries: `kvc_kernels.score.window_attention`, then `smooth`.

    Attributes
    ----------
    power, group, excluded : of the former.
    pool, pooling, half_life, half_lives : of the latter; the queries' own keys are not pooled.
        Options that agree in all but `half_lives` are the same: these follow from the rest.
    """

    power: int = 1
    group: str = "sum"
    excluded: int = 0
    pool: int = 1
    pooling: str = "max"
    half_life: float = 0.0
    half_lives: torch.Tensor | None = dataclasses.field(default=None, compare=False)
