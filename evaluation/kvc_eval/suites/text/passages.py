"""Natural text: runs of sentences of annual_messages.txt, with other sentences hidden in them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from random import Random

FILE = Path(__file__).with_name("annual_messages.txt")
#: Words at a document's beginning among which nothing is hidden: `forced.trim` takes tokens there.
CLEAR_WORDS = 80
_END = re.compile(r"(?<![ .][A-Z]\.)(?<!Gen\.)(?<!St\.)(?<!Mr\.)(?<=[.?!]) (?=[A-Z])")


@functools.cache
def sentences() -> tuple[str, ...]:
    """All sentences, in their order."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return tuple(
        sentence for line in lines if not line.startswith("#") for sentence in _END.split(line)
    )


def passage(words: int, rng: Random) -> list[str]:
    """A run of about `words` words, of whole sentences; past the end it goes on at the beginning.

    Raises ValueError for so few that nothing could be hidden.
    """
    if words < CLEAR_WORDS:
        raise ValueError(f"a text of {words} words is too short to hide anything in")
    everything = sentences()
    at, out, counted = rng.randrange(len(everything)), list[str](), 0
    while counted < words:
        out.append(everything[at % len(everything)])
        counted += len(out[-1].split())
        at += 1
    if len(out) > 1 and counted - words > words - counted + len(out[-1].split()):
        out.pop()
    return out


def hide(lines: list[str], words: int, rng: Random) -> str:
    """`lines` in their order at random places of a passage, about `words` words in all."""
    text = passage(words - sum(len(line.split()) for line in lines), rng)
    first = clear_sentences(text)
    slots = sorted(rng.randint(first, len(text)) for _ in lines)
    for slot, line in reversed(list(zip(slots, lines, strict=True))):
        text.insert(slot, line)
    return " ".join(text)


def clear_sentences(text: list[str]) -> int:
    """How many of the first sentences it takes to have `CLEAR_WORDS` words."""
    counted = 0
    for number, sentence in enumerate(text):
        if counted >= CLEAR_WORDS:
            return number
        counted += len(sentence.split())
    return len(text)
