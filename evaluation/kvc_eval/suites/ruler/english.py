"""Words and filler sentences. The words are wonderwords', as in RULER."""

from __future__ import annotations

import dataclasses
import functools
from random import Random

_VERBS = (
    "follows", "finds", "leaves", "passes", "carries", "watches", "holds", "covers", "touches",
    "reaches", "meets", "joins", "crosses", "turns", "lifts", "keeps", "moves", "hides", "shows",
    "feeds", "warms", "paints", "guards", "drops",
)  # fmt: skip
_PLACES = (
    "near", "behind", "beside", "under", "above", "across", "along", "around", "before", "beyond",
    "inside", "past",
)  # fmt: skip
SENTENCE_WORDS = 10  # of what `sentence` makes


@dataclasses.dataclass(frozen=True)
class Lexicon:
    """Plain lower-case English words of 3 to 9 letters, sorted."""

    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """Each word once."""
        return tuple(sorted({*self.nouns, *self.adjectives}))


@functools.cache
def lexicon() -> Lexicon:
    """The words, read once."""
    from wonderwords import RandomWord, is_profanity

    words = RandomWord()

    def of(category: str) -> tuple[str, ...]:
        found = words.filter(regex="[a-z]{3,9}", include_categories=[category])
        return tuple(sorted({word for word in found if not is_profanity(word)}))

    return Lexicon(of("noun"), of("adjective"))


def sentence(rng: Random) -> str:
    """Ten words that make a sentence and little sense."""
    words = lexicon()
    first, second = rng.sample(words.adjectives, 2)
    subject, thing, place = rng.sample(words.nouns, 3)
    verb, where = rng.choice(_VERBS), rng.choice(_PLACES)
    return f"The {first} {subject} {verb} the {second} {thing} {where} the {place}."


def haystack(lines: list[str], words: int, rng: Random) -> str:
    """`lines` in their order at random depths among filler sentences, about `words` words in all.

    Raises ValueError if the lines alone are longer.
    """
    spare = words - sum(len(line.split()) for line in lines)
    if spare < 0:
        raise ValueError(f"what is hidden takes {words - spare} words, the document has {words}")
    filler = [sentence(rng) for _ in range(round(spare / SENTENCE_WORDS))]
    slots = sorted(rng.randrange(len(filler) + 1) for _ in lines)
    out: list[str] = []
    begin = 0
    for slot, line in zip(slots, lines, strict=True):
        out += [*filler[begin:slot], line]
        begin = slot
    return " ".join(out + filler[begin:])
