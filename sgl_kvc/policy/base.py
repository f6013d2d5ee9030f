"""What a scorer and an apportioner are: the contract, and finding them by name.

A method is one file, named after it, in ``scorers/`` or ``apportioners/``; the file's name
with dashes is the name a request uses. docs/adding-a-policy.md shows how to write one.

A scorer's file holds ``score(context, **parameters) -> float32 [H, n]``, finite: how much each
key of each head should be kept. One that looks at every query of the prompt also holds
``observe(context, **parameters)``: it is called for every chunk of the prompt in order and
returns what the next call, and at last ``score``, finds in ``context.state``.

A scorer's file may hold ``lift(scores, kept, behind, **parameters) -> None``, which changes scores
[..., n] in place whenever keys are about to be selected, after prefill and in decode: for what
depends on how many KVs a head keeps (`kept`) and on which keys are the newest. `behind` positions
follow that are kept in any case. It leaves -inf where it is, no key is there.

With ``CONTINUAL`` a scorer says how its scores go on while a request decodes (`spec.catalogue`).
What ``score`` returns is then what attention in decode is added to, or, with "rescored", its file
also holds ``rescore(held_context, **parameters) -> float32 [H, n]``, finite, which scores anew what
the heads of a layer hold whenever keys are selected in decode.

An apportioner's file holds ``apportion(context, **parameters) -> int64 [L, H]``, pages per head:
at least 1, at most C, summing to ``context.total``. It may hold ``observe(layer_context,
**parameters) -> float32 [K]``, called once a layer beside the scorer; the results are stacked
in ``context.statistics``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kvc_kernels.score import causal_attention, window_attention

from sgl_kvc.spec import CompressionSpec, methods

#: Minimum of a head's profile / the mean, so that scores of such heads stay ordered.
_MIN_WEIGHT = 1e-3


class FactsError(ValueError):
    """Facts about a model that cannot be used. The message names their file and says why."""


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What methods may know about the model. None where the model or server has no such thing.

    Attributes
    ----------
    cos_sin : float32 [positions, R], the rotary embedding's cosines, then sines, of R/2 angles;
        R <= D dims are rotated.
    neox : whether rotation pairs dim i with i + R/2 (else 2i with 2i + 1).
    output_projection : per layer [hidden, H*G*Dv], the weight applied to attention's output.
    special_tokens, punctuation : int64, token ids of each class.
    head_profile : float32 [L, H] in [0, 1], how much a head retrieves (docs/adding-a-policy.md).
    """

    cos_sin: torch.Tensor | None = None
    neox: bool = True
    output_projection: list[torch.Tensor] | None = None
    special_tokens: torch.Tensor | None = None
    punctuation: torch.Tensor | None = None
    head_profile: torch.Tensor | None = None

    def head_weights(self, power: float) -> torch.Tensor | None:
        """float32 [L, H], (the head's profile / the mean) to a power; None without a profile."""
        if self.head_profile is None:
            return None
        share = self.head_profile.float() / self.head_profile.float().mean()
        return share.nan_to_num(1.0).clamp(min=_MIN_WEIGHT) ** power


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What a scorer sees of one layer of what is compressed, ``n`` tokens.

    Attributes
    ----------
    layer, layers : index among the layers this rank holds, and their number.
    queries : [w, H*G, D], the last ``w = min(spec.window, n)`` queries, rotated; query head
        ``h*G + g`` reads KV head ``h``. For ``observe``, the chunk's.
    keys, values : [n, H, D] and [n, H, Dv], rotated keys; the queries are those of the last
        positions. For ``observe``, up to the chunk's end.
    scale : factor on the attention logits.
    spec : the request's knob.
    tokens : int64 [n], token ids.
    kept : KVs a head keeps on average.
    facts : about the model.
    state : what ``observe`` returned for the chunk before; None for the first.
    lse : float32 [w, H*G], natural log-sum-exp of every query's logits, where the attention
        kernel has told it.
    previous : for ``score``, what it returned for the layer before; None for the first.
    scores : for an apportioner's ``observe``, what ``score`` returned for this layer.
    last_chunk : for `observe`, whether no chunk follows.
    """

    layer: int
    layers: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    spec: CompressionSpec
    tokens: torch.Tensor
    kept: int
    facts: ModelFacts = ModelFacts()
    state: Any = None
    lse: torch.Tensor | None = None
    previous: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    last_chunk: bool = True

    @property
    def forced(self) -> int:
        """How many of the window's own keys a scorer may put first, whatever they score."""
        return forced_recent(self.queries.shape[0], self.kept)

    def window_attention(self, power: int = 1, **how: Any) -> torch.Tensor:
        """float32 [H, n], attention every key gets (`kvc_kernels.score.window_attention`)."""
        return window_attention(
            self.queries, self.keys, self.scale, power, lse=self._exact_lse, **how
        )

    def causal_attention(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Attention itself, in blocks of queries (`kvc_kernels.score.causal_attention`)."""
        return causal_attention(self.queries, self.keys, self.scale, lse=self._exact_lse)

    def half_lives(self, half_life: float, reach: float) -> float | torch.Tensor:
        """`half_life` for `fade_to_neighbours`, head by head: float32 [H, 1], or the number itself.

        In a head that retrieves more than the mean one it is longer, by as much as the profile
        says and at most `reach` times; in one that retrieves less, shorter, at least 1 / `reach`.
        """
        weights = self.facts.head_weights(1.0) if reach > 1 else None
        if weights is None:
            return half_life
        longer = weights[self.layer].clamp(1 / reach, reach).to(self.keys.device)
        return half_life * longer[:, None]

    @property
    def _exact_lse(self) -> torch.Tensor | None:
        """The log-sum-exp, for attention that several keys may get all of.

        On a CPU None: it is found anew, from the same logits, and such keys tie at exactly 1. That
        of the prefill is rounded otherwise when the prompt's beginning was cached, and which of
        them are kept would depend on it.
        """
        return self.lse if self.keys.is_cuda else None


@dataclasses.dataclass(frozen=True)
class HeldContext:
    """What ``rescore`` sees of one layer of a request that decodes: n places of every head.

    Attributes
    ----------
    keys : [H, n, D], rotated, those of a head in the order of their positions.
    held : bool [H, n], where there is a key; heads hold different numbers, at the end.
    attention : float32 [H, n], what the last ``spec.window`` decode queries (all since keys were
        last selected, if there were fewer) paid each key, summed over them and their group.
    length : tokens of the request so far, the position of the next query.
    spec : the request's knob.
    facts : about the model.
    state : what ``observe`` returned at last for the prompt; None if nothing of it was scored.
    """

    keys: torch.Tensor
    held: torch.Tensor
    attention: torch.Tensor
    length: int
    spec: CompressionSpec
    facts: ModelFacts = ModelFacts()
    state: Any = None


def forced_recent(recent: int, kept: int) -> int:
    """How many of the last `recent` positions are kept whatever they score.

    At most a quarter of the `kept` KVs that a head keeps on average: at high rates they would
    fill the budget, and all heads would keep the same.
    """
    return min(recent, kept // 4)


@dataclasses.dataclass(frozen=True)
class PagesContext:
    """What an apportioner sees.

    Attributes
    ----------
    page_scores : float32 [L, H, C], the best score in each page, descending; protected
        positions are above all others.
    total : pages there are to give, a multiple of L * H.
    page_size : KVs in a page.
    statistics : float32 [L, K], what the apportioner's ``observe`` said of each layer.
    facts : about the model.
    """

    page_scores: torch.Tensor
    total: int
    page_size: int
    statistics: torch.Tensor | None = None
    facts: ModelFacts = ModelFacts()


@dataclasses.dataclass(frozen=True)
class Method:
    """A scorer or an apportioner with a request's parameters.

    Attributes
    ----------
    run : its ``score`` or ``apportion``.
    observe, lift, rescore : None if it has none.
    """

    run: Callable[[Any], torch.Tensor]
    observe: Callable[[LayerContext], Any] | None
    lift: Callable[[torch.Tensor, int, int], None] | None
    rescore: Callable[[HeldContext], torch.Tensor] | None = None


def scorer(spec: CompressionSpec) -> Method:
    """The scorer a request asked for."""
    return _method("scorers", spec.scorer, "score", spec)


def apportioner(spec: CompressionSpec) -> Method:
    """The apportioner a request asked for."""
    return _method("apportioners", spec.apportioner, "apportion", spec)


def _method(family: str, name: str, function: str, spec: CompressionSpec) -> Method:
    module = importlib.import_module(f"sgl_kvc.policy.{family}.{name.replace('-', '_')}")
    own = methods(family)[name].parameters
    parameters = {key: spec.parameters.get(key, p.default) for key, p in own.items()}
    others = (getattr(module, key, None) for key in ("observe", "lift", "rescore"))
    return Method(
        functools.partial(getattr(module, function), **parameters),
        *(other and functools.partial(other, **parameters) for other in others),
    )
