"""Repeat a passage word for word. Not in RULER: what compression does worst."""

from __future__ import annotations

from random import Random

from kvc_eval.sample import Sample
from kvc_eval.suites.ruler.english import haystack, sentence

SENTENCES = 4


def copy(words: int, rng: Random) -> Sample:
    """A marked passage of `SENTENCES` sentences; the score is the share that is repeated."""
    passage = [sentence(rng) for _ in range(SENTENCES)]
    line = f"[Passage begins] {' '.join(passage)} [Passage ends]"
    return Sample(
        task="copy",
        document="The following text holds a marked passage.\n\n" + haystack([line], words, rng),
        question="\n\nRepeat the marked passage word for word, and nothing else.",
        answers=tuple(passage),
        metric="string_match",
        max_tokens=160,
    )
