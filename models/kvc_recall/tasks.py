"""Documents with facts hidden in them, and questions about the facts.

Each task is a function that makes `Facts`: lines to scatter in a document, and turns (question,
answer) about them. `compose` scatters the lines among filler sentences so that the rendered
prompt (`<bos>` document question `<answer>`) is exactly as long as asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from .vocabulary import (
    ADJECTIVES,
    ANIMALS,
    CANDIDATES,
    COLOURS,
    DETERMINERS,
    NOUNS,
    ORDINALS,
    PREPOSITIONS,
    VALUES,
    VARIABLES,
    VERBS,
)  # fmt: skip

CODE_LINE = 7  # tokens of "the code for red falcon is ... ." without the value words
FRAME = 2  # <bos> and <answer>


@dataclass
class Turn:
    """A question, the answer expected, and its parts where it has several."""

    question: str
    answer: str
    answers: list[str] = field(default_factory=list)


@dataclass
class Facts:
    """Lines that stay whole, wherever they are put, and what is asked about them."""

    lines: list[str]
    turns: list[Turn]


@dataclass
class Prompt:
    """One task: the user message, and the completion that is right.

    `text` is the document followed by the question. `answers` holds the parts of an answer to
    several questions, in the order asked. `later` holds further turns, used in training only.
    """

    task: str
    text: str
    answer: str
    answers: list[str] = field(default_factory=list)
    later: list[Turn] = field(default_factory=list)


def words(text: str) -> int:
    """Tokens in a text whose words are separated by single spaces."""
    return text.count(" ") + 1 if text else 0


# --- filler ------------------------------------------------------------------------------------


def _chain() -> dict[str, list[str]]:
    """Four likely successors of each filler word: a fixed bigram chain."""
    rng, chain = Random(20240229), {}
    order = [DETERMINERS, ADJECTIVES, NOUNS, VERBS, PREPOSITIONS, DETERMINERS]
    for group, after in pairwise(order):
        for word in group:
            chain[word] = rng.sample(after, 4)
    return chain


_CHAIN = _chain()
_SENTENCE = [ADJECTIVES, NOUNS, VERBS, PREPOSITIONS, DETERMINERS, ADJECTIVES, NOUNS]


def filler_sentence(length: int, rng: Random) -> str:
    """A sentence of `length` tokens, the full stop included, from the chain with 10 % jumps."""
    if length < 2:
        return "."
    word = rng.choice(DETERMINERS)
    out = [word]
    for i in range(length - 2):
        after = _SENTENCE[i % 5]
        word = rng.choice(after) if rng.random() < 0.1 else rng.choice(_CHAIN[word])
        out.append(word)
    out.append(".")
    return " ".join(out)


def compose(facts: Facts, length: int, rng: Random) -> str:
    """The document: `facts.lines` in their order, filler between, `length` tokens in all."""
    spare = length - sum(map(words, facts.lines))
    if spare < 0:
        raise ValueError(f"{len(facts.lines)} lines do not fit in {length} tokens")
    sentences = []
    while spare > 0:
        size = spare if spare <= 9 else min(rng.choice((5, 9, 9)), spare - 2)
        sentences.append(filler_sentence(size, rng))
        spare -= size
    slots = sorted(rng.randrange(len(sentences) + 1) for _ in facts.lines)
    out, at = [], 0
    for slot, line in zip(slots, facts.lines, strict=True):
        out += sentences[at:slot]
        out.append(line)
        at = slot
    return " ".join(out + sentences[at:])


# --- tasks -------------------------------------------------------------------------------------


def _keys(n: int, shared: bool, rng: Random) -> list[str]:
    """`n` distinct keys. If `shared`, from a grid about twice as large: most share a word."""
    side = 32
    if shared:
        side = next(s for s in range(2, 33) if s * s >= min(2 * n, 1024))
    colours, animals = rng.sample(COLOURS, side), rng.sample(ANIMALS, side)
    if not shared and n <= 32:
        return [f"{c} {a}" for c, a in zip(rng.sample(colours, n), animals, strict=False)]
    return [f"{colours[i // side]} {animals[i % side]}" for i in rng.sample(range(side**2), n)]


def draw(pool: list[str], n: int, rng: Random) -> list[str]:
    """`n` words of `pool`, distinct if it has so many."""
    return rng.sample(pool, n) if n <= len(pool) else rng.choices(pool, k=n)


def codes(n: int, rng: Random, shared: bool = True, value_words: int = 3) -> list[tuple[str, str]]:
    """`n` pairs (key, value)."""
    values = draw(VALUES, n * value_words, rng)
    return [
        (key, " ".join(values[i * value_words : (i + 1) * value_words]))
        for i, key in enumerate(_keys(n, shared, rng))
    ]


def needles(
    length: int, rng: Random, needles: int = 8, questions: int = 1, shared: bool = True,
    value_words: int = 3,
) -> Facts:  # fmt: skip
    """Lines "the code for red falcon is tango seven kilo ." and a question about one of them.

    If `shared`, other keys have the colour or the animal of the one that is asked about.
    """
    pairs = codes(needles, rng, shared, value_words)
    asked = rng.sample(pairs, min(questions, len(pairs)))
    if shared and len(pairs) > 1:
        asked.sort(key=lambda pair: not _has_distractor(pair[0], pairs))
    turns = [Turn(f"what is the code for {key} ?", value) for key, value in asked]
    return Facts([f"the code for {key} is {value} ." for key, value in pairs], turns)


def _has_distractor(key: str, pairs: list[tuple[str, str]]) -> bool:
    colour, animal = key.split()
    return any(
        other != key and (other.startswith(f"{colour} ") or other.endswith(f" {animal}"))
        for other, _ in pairs
    )


def questions(
    length: int, rng: Random, needles: int = 16, questions: int = 8, shared: bool = True,
    value_words: int = 3, sort: bool = False,
) -> Facts:  # fmt: skip
    """Several codes asked for in one question, all given in one answer, in the order asked.

    "what are the codes for : first red falcon , second blue otter ?" is answered by
    "first red falcon is tango seven kilo ; second blue otter is echo nine plum". If `sort`, keys of
    one colour follow each other, which is harder.
    """
    pairs = codes(needles, rng, shared, value_words)
    asked = rng.sample(pairs, min(questions, needles))
    if sort:
        asked.sort()
    listed = " , ".join(f"{o} {k}" for o, (k, _) in zip(ORDINALS, asked, strict=False))
    answer = " ; ".join(f"{o} {k} is {v}" for o, (k, v) in zip(ORDINALS, asked, strict=False))
    turn = Turn(f"what are the codes for : {listed} ?", answer, [v for _, v in asked])
    return Facts([f"the code for {key} is {value} ." for key, value in pairs], [turn])


def copy(length: int, rng: Random, words: int = 32, pool: list[str] = VALUES) -> Facts:
    """A marked passage of `words` words, to be repeated word for word."""
    span = " ".join(draw(pool, words, rng))
    line = f"passage begins : {span} : passage ends ."
    return Facts([line], [Turn("please repeat the passage .", span)])


def votes(length: int, rng: Random, votes: int = 24, candidates: int = 3) -> Facts:
    """Scattered lines "alice gets a vote .": who has most? The winner has about 60 %."""
    names = rng.sample(CANDIDATES, candidates)
    won = max(votes * 3 // 5, votes // 2 + 1)
    cast = [names[0]] * won + rng.choices(names[1:], k=votes - won)
    rng.shuffle(cast)
    return Facts([f"{n} gets a vote ." for n in cast], [Turn("who has most votes ?", names[0])])


def chains(length: int, rng: Random, chains: int = 3, hops: int = 0, asked: int = 1) -> Facts:
    """Links "note kappa follows sigma ." in any order: follow one from its start to its end.

    The answer names every stop: "sigma follows theta follows iota". `hops` 0 draws 2 to 4.
    """
    names, lines, turns = rng.sample(VARIABLES, 32), [], []
    for _ in range(chains):
        path = [names.pop() for _ in range((hops or rng.randint(2, 4)) + 1)]
        lines += [f"note {a} follows {b} ." for a, b in pairwise(path)]
        lines.append(f"note {path[-1]} ends .")
        turns.append(Turn(f"what does {path[0]} follow ?", " follows ".join(path[1:])))
    rng.shuffle(lines)
    return Facts(lines, rng.sample(turns, asked))


TASKS: dict[str, tuple[Callable[..., Facts], dict]] = {
    "single": (needles, {"needles": 1, "shared": False}),
    "needles8": (needles, {"needles": 8}),
    "needles32": (needles, {"needles": 32}),
    "questions8": (questions, {"needles": 16, "questions": 8}),
    "copy32": (copy, {"words": 32}),
    "votes": (votes, {}),
    "chains": (chains, {}),
}


def sample(task: str, length: int, rng: Random, **options: Any) -> Prompt:
    """A prompt of exactly `length` tokens once rendered by the chat template.

    `options` override the task's own (see its function), such as `needles=16`, `value_words=2`.
    Raises ValueError if the facts do not fit in `length`.
    """
    make, defaults = TASKS[task]
    facts = make(length, rng, **{**defaults, **options})
    if make is not chains:  # links are shuffled already
        rng.shuffle(facts.lines)
    return build(task, facts, length, rng)


def build(task: str, facts: Facts, length: int, rng: Random) -> Prompt:
    """Put `facts` in a document and ask the first turn's question, in `length` tokens."""
    turn = facts.turns[0]
    document = compose(facts, length - FRAME - words(turn.question), rng)
    text = f"{document} {turn.question}" if document else turn.question
    return Prompt(task, text, turn.answer, turn.answers, facts.turns[1:])
