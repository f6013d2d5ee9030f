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

A scorer with ``observe`` whose file holds ``keep(state, kept) -> state`` can score a prompt that is
compressed while it comes in (``prefill_block``): what is left of its state once a head holds only
the `kept` keys, int64 [m], of those that it held. Every head has a state of its own there.

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
from kvc_kernels.score import causal_attention, smooth, window_attention, window_scores
from kvc_kernels.windows import Window, WindowOptions

from sgl_kvc.policy.facts import NO_FACTS, ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.spec import CompressionSpec, methods


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What a scorer sees of one layer of what is compressed, ``n`` tokens.

    Attributes
    ----------
    layer, layers : index among the layers this rank holds, and their number.
    queries : [w, H*G, D], the last ``w = min(spec.window, n)`` queries, rotated; query head
        ``h*G + g`` reads KV head ``h``. For ``observe``, the chunk's.
    kvs : keys and values; the queries are those of the last positions. For ``observe``, up to
        the chunk's end.
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
    head : which head this is, where heads hold different keys and each is scored alone; else None.
    together : for ``score``, window attention that is computed for a batch of prompts at once.
    """

    layer: int
    layers: int
    queries: torch.Tensor
    kvs: PromptKVs
    scale: float
    spec: CompressionSpec
    tokens: torch.Tensor
    kept: int
    facts: ModelFacts = NO_FACTS
    state: Any = None
    lse: torch.Tensor | None = None
    previous: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    last_chunk: bool = True
    head: int | None = None
    together: Callable[[WindowOptions], torch.Tensor] | None = None

    @property
    def length(self) -> int:
        """n."""
        return self.kvs.length

    @property
    def heads(self) -> int:
        """H."""
        return self.kvs.heads

    @property
    def device(self) -> torch.device:
        return self.kvs.device

    @property
    def keys(self) -> torch.Tensor:
        """[n, H, D], rotated; asking for them copies them out of the cache, as for values."""
        return self.kvs.keys

    @property
    def values(self) -> torch.Tensor:
        """[n, H, Dv]."""
        return self.kvs.values

    @property
    def own_heads(self) -> slice:
        """Which of the rank's heads these are."""
        return slice(None) if self.head is None else slice(self.head, self.head + 1)

    @property
    def forced(self) -> int:
        """How many of the window's own keys a scorer may put first, whatever they score."""
        return forced_recent(self.queries.shape[0], self.kept)

    def window_attention(
        self,
        power: int = 1,
        *,
        group: str = "sum",
        excluded: int = 0,
        pool: int = 1,
        pooling: str = "max",
        half_life: float = 0.0,
        reach: float = 1.0,
    ) -> torch.Tensor:
        """float32 [H, n], attention every key gets, that of neighbours taken into account.

        On a GPU keys are read where they lie, and what a scorer asks is computed for all prompts
        of the batch that have the same one.

        Parameters
        ----------
        power, group, excluded : see `kvc_kernels.score.window_attention`.
        pool, pooling, half_life : see `kvc_kernels.score.smooth`; the queries' own keys are not
            pooled.
        reach : above 1, half-lives are longer in heads that retrieve more than the mean one, by
            as much as the profile says and at most so many times, and shorter in others.
        """
        half_lives = self.facts.half_lives(half_life, reach) if half_life and reach > 1 else None
        if half_lives is not None:
            half_life, half_lives = half_life * reach, half_lives[self.layer, self.own_heads]
        how = WindowOptions(power, group, excluded, pool, pooling, half_life, half_lives)
        if self.together is not None:
            return self.together(how)
        if self.kvs.layer_k is not None:
            return window_scores([self.window], self.kvs.layer_k, self.scale, how)[0]
        scores = window_attention(
            self.queries, self.keys, self.scale, power,
            group=group, excluded=excluded, lse=self._exact_lse,
        )  # fmt: skip
        return smooth(
            scores, len(self.queries), pool=pool, pooling=pooling,
            half_life=half_life, half_lives=half_lives,
        )  # fmt: skip

    @property
    def window(self) -> Window:
        """The queries, and where their keys lie."""
        assert self.kvs.slots is not None
        return Window(self.queries, self.kvs.slots, self._exact_lse)

    def causal_attention(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Attention itself, in blocks of queries (`kvc_kernels.score.causal_attention`)."""
        return causal_attention(self.queries, self.keys, self.scale, lse=self._exact_lse)

    @property
    def _exact_lse(self) -> torch.Tensor | None:
        """The log-sum-exp, for attention that several keys may get all of.

        On a CPU None: it is found anew, from the same logits, and such keys tie at exactly 1. That
        of the prefill is rounded otherwise when the prompt's beginning was cached, and which of
        them are kept would depend on it.
        """
        return self.lse if self.device.type == "cuda" else None


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
    facts: ModelFacts = NO_FACTS
    state: Any = None


def forced_recent(recent: int, kept: int) -> int:
    """How many of the last `recent` positions are kept whatever they score.

    At most a quarter of the `kept` KVs that a head keeps on average: at high rates they would
    fill the budget, and all heads would keep the same.
    """
    return min(recent, kept // 4)


@dataclasses.dataclass(frozen=True)
class Method:
    """A scorer or an apportioner with a request's parameters.

    Attributes
    ----------
    run : its ``score`` or ``apportion``.
    observe, lift, rescore, keep : None if it has none.
    """

    run: Callable[[Any], torch.Tensor]
    observe: Callable[[LayerContext], Any] | None
    lift: Callable[[torch.Tensor, int, int], None] | None
    rescore: Callable[[HeldContext], torch.Tensor] | None = None
    keep: Callable[[Any, torch.Tensor], Any] | None = None


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

    def other(name: str) -> Any:
        found = getattr(module, name, None)
        return found and functools.partial(found, **parameters)

    return Method(
        functools.partial(getattr(module, function), **parameters),
        other("observe"), other("lift"), other("rescore"), getattr(module, "keep", None),
    )  # fmt: skip
