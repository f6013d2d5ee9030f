"""Which words are most common: in a numbered list, and in a text whose words follow a power law."""

from __future__ import annotations

import math
import string
from random import Random

from kvc_eval.sample import Sample
from kvc_eval.suites.ruler.english import lexicon

COMMON = 10
_LONG_LIST = 900  # entries from which RULER's counts are used for prompts of 4,096 tokens or more
_ZETA_2 = math.pi**2 / 6  # normalises k^-2, the power law of RULER
_LEAST_CODED_WORDS = 200  # so that the third word stands out from the fourth


def common(words: int, rng: Random) -> Sample:
    """A shuffled, numbered list: ten words come 30 times each, the others 3 times each.

    In short lists 6 times and once, as in RULER; in lists so long that the lexicon runs out,
    both more often. Its worked example is left out.
    """
    entries = words // 2  # a number and a word
    known = lexicon().all
    rare = 1
    if entries >= _LONG_LIST:
        rare = max(3, math.ceil(entries / len(known)))
    often = 6 if rare == 1 else 10 * rare
    others = (entries - COMMON * often) // rare
    if others < COMMON:
        raise ValueError(f"{COMMON} common words come {often} times each in {entries} entries")
    chosen = rng.sample(known, COMMON + min(others, len(known) - COMMON))
    listed = chosen[:COMMON] * often + chosen[COMMON:] * rare
    rng.shuffle(listed)
    return Sample(
        task="cwe",
        document="In the following list some words come more often than others.\n\n"
        + " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1)),
        question=f"\n\nWhich {COMMON} words come most often in the list above? "
        "Answer with the words only.",
        answers=tuple(chosen[:COMMON]),
        metric="string_match",
        max_tokens=120,
    )


def frequent(words: int, rng: Random) -> Sample:
    """Coded words, the k-th in a share of k^-2 / ζ(2); the first is dots, the next three are asked.

    The counts are the law's, rounded down, so the three always lead.
    """
    if words < _LEAST_CODED_WORDS:
        raise ValueError(f"a text of {words} coded words has no clear order")
    counts: list[int] = []
    while not counts or counts[-1] > 0:
        counts.append(int(words / _ZETA_2 / (len(counts) + 1) ** 2))
    coded = ["...", *_coded(len(counts) - 1, rng)]
    text = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    return Sample(
        task="fwe",
        document="In the following coded text some words come more often than others.\n\n"
        + " ".join(text),
        question="\n\nWithout the dots, which three words come most often in the text above? "
        "Answer with the words only.",
        answers=tuple(coded[1:4]),
        metric="string_match",
        max_tokens=50,
    )


def _coded(n: int, rng: Random) -> list[str]:
    """`n` distinct words of six letters."""
    coded: dict[str, None] = {}
    while len(coded) < n:
        coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    return list(coded)
