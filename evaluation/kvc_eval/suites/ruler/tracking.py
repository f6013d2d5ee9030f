"""Variable tracking: which variables hold a value, through a chain of assignments."""

from __future__ import annotations

import string
from itertools import pairwise
from random import Random

from kvc_eval.sample import Sample
from kvc_eval.suites.ruler.english import haystack

CHAINS, HOPS = 2, 4
_BEFORE = "Follow the assignments of variables that are hidden in this text.\n\n"
_MAX_TOKENS = 60


def variables(words: int, rng: Random) -> Sample:
    """`CHAINS` chains of `HOPS` hops each, in order; all variables of one are asked for.

    RULER has one chain, where naming every variable would do; the second is there against that.
    """
    names = _names(CHAINS * (HOPS + 1), rng)
    values = rng.sample(range(10_000, 100_000), CHAINS)
    chains = [names[i * (HOPS + 1) : (i + 1) * (HOPS + 1)] for i in range(CHAINS)]
    links = [
        [f"VAR {chain[0]} = {value}.", *(f"VAR {b} = VAR {a}." for a, b in pairwise(chain))]
        for chain, value in zip(chains, values, strict=True)
    ]
    which = rng.randrange(CHAINS)
    return Sample(
        task="vt",
        document=_BEFORE + haystack(_interleaved(links, rng), words, rng),
        question=f"\n\nWhich variables hold the value {values[which]}, directly or through other "
        "variables? Answer with their names only.",
        answers=tuple(chains[which]),
        metric="string_match",
        max_tokens=_MAX_TOKENS,
    )


def _names(n: int, rng: Random) -> list[str]:
    """`n` distinct names of five capital letters."""
    names: dict[str, None] = {}
    while len(names) < n:
        names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    return list(names)


def _interleaved(lists: list[list[str]], rng: Random) -> list[str]:
    """All items, those of one list in their order."""
    turns = [i for i, items in enumerate(lists) for _ in items]
    rng.shuffle(turns)
    iterators = [iter(items) for items in lists]
    return [next(iterators[turn]) for turn in turns]
