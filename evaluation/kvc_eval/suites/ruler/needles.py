"""Needles in a haystack: one key; others beside it; several values of a key; several keys."""

from __future__ import annotations

from random import Random

from kvc_eval.sample import Sample
from kvc_eval.suites.ruler.english import haystack, lexicon

MANY = 4  # keys, values or questions of the tasks with several, as in RULER
_BEFORE = "The following text hides some magic numbers. Remember them for a question.\n\n"
_MAX_TOKENS = 128


def single(words: int, rng: Random) -> Sample:
    """One number of one key."""
    return _ask("niah_single", words, rng, keys=1)


def multikey(words: int, rng: Random) -> Sample:
    """Numbers of `MANY` keys, one is asked for."""
    return _ask("niah_multikey", words, rng, keys=MANY)


def multivalue(words: int, rng: Random) -> Sample:
    """`MANY` numbers of one key, all are asked for."""
    return _ask("niah_multivalue", words, rng, keys=1, values=MANY)


def multiquery(words: int, rng: Random) -> Sample:
    """Numbers of `MANY` keys, all are asked for."""
    return _ask("niah_multiquery", words, rng, keys=MANY, asked=MANY)


def _ask(
    task: str, words: int, rng: Random, keys: int, values: int = 1, asked: int = 1
) -> Sample:  # fmt: skip
    """A key is an adjective and a noun, a value a number of seven digits."""
    names = _names(keys, rng)
    numbers = [str(number) for number in rng.sample(range(10**6, 10**7), keys * values)]
    hidden = {name: numbers[i * values : (i + 1) * values] for i, name in enumerate(names)}
    lines = [
        f"One of the magic numbers of {name} is {number}."
        for name, own in hidden.items()
        for number in own
    ]
    rng.shuffle(lines)
    about = rng.sample(names, asked)
    listed = " and ".join(filter(None, [", ".join(about[:-1]), about[-1]]))
    what = "is the magic number" if values * asked == 1 else "are all the magic numbers"
    return Sample(
        task=task,
        document=_BEFORE + haystack(lines, words, rng),
        question=f"\n\nWhat {what} of {listed} in the text above? Answer with numbers only.",
        answers=tuple(number for name in about for number in hidden[name]),
        metric="string_match",
        max_tokens=_MAX_TOKENS,
    )


def _names(n: int, rng: Random) -> list[str]:
    """`n` keys that share no word."""
    words = lexicon()
    pairs = zip(rng.sample(words.adjectives, n), rng.sample(words.nouns, n), strict=True)
    return [f"{adjective}-{noun}" for adjective, noun in pairs]
