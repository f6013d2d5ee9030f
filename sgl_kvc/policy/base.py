"""What a scorer and an apportioner are: the contract, and finding them by name.

A method is one file, named after it, in ``scorers/`` or ``apportioners/``; the file's name
with dashes is the name a request uses. See docs/structure.md for how to add one.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable

import torch

from sgl_kvc.spec import CompressionSpec


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What a scorer sees of one layer of one prompt of ``n`` tokens.

    Attributes
    ----------
    layer : index among the layers this rank holds.
    queries : [w, H*G, D], the last ``w = min(spec.window, n)`` queries, rotated.
    keys, values : [n, H, D] and [n, H, Dv], rotated keys.
    scale : factor on the attention logits.
    spec : the request's knob.
    """

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    spec: CompressionSpec


#: score(context) -> float32 [H, n], finite: how much each key of each head should be kept.
Scorer = Callable[[LayerContext], torch.Tensor]

#: apportion(page_scores [L, H, C], total) -> int64 [L, H], pages per head: at least 1, at
#: most C, summing to `total`. `page_scores` descend along the last axis.
Apportioner = Callable[[torch.Tensor, int], torch.Tensor]


def scorer(name: str) -> Scorer:
    """The ``score`` function of ``scorers/<name>.py``."""
    return _method("scorers", name).score


def apportioner(name: str) -> Apportioner:
    """The ``apportion`` function of ``apportioners/<name>.py``."""
    return _method("apportioners", name).apportion


def _method(family: str, name: str):
    return importlib.import_module(f"sgl_kvc.policy.{family}.{name.replace('-', '_')}")
