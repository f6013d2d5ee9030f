"""The mix of documents the model is trained on, and their packing into rows of token ids.

A row is one document and as many turns about it as fit, in the chat template's form. Short rows
carry short codes and few facts; all quantities are drawn to fill a row of the given length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import numpy as np

from .tasks import (
    CODE_LINE,
    FRAME,
    Facts,
    Prompt,
    Turn,
    build,
    chains,
    codes,
    copy,
    needles,
    questions,
    votes,
    words,
)  # fmt: skip
from .vocabulary import (
    ANIMALS,
    ANSWER,
    BOS,
    CANDIDATES,
    COLOURS,
    EOS,
    INDEX,
    PAD,
    VALUES,
    VARIABLES,
)

# Sample kind and its share. "dense" asks about every needle that fits: most answers per token.
MIX = {
    "dense": 0.36, "sparse": 0.13, "single": 0.04, "questions": 0.15, "copy": 0.11,
    "votes": 0.06, "chains": 0.07, "several": 0.08,
}  # fmt: skip
# Rows of the first length: copying any word teaches to match words, which the rest builds on.
FIRST_MIX = {
    "dense": 0.32, "sparse": 0.06, "single": 0.02, "questions": 0.08, "copy": 0.40,
    "votes": 0.02, "chains": 0.06, "several": 0.04,
}  # fmt: skip
# The last stage: codes are learnt by then; long answers and counting are not.
LAST_MIX = {
    "dense": 0.06, "sparse": 0.05, "single": 0.02, "questions": 0.52, "copy": 0.11,
    "votes": 0.16, "chains": 0.04, "several": 0.04,
}  # fmt: skip
FIRST_LENGTH = 64
NO_ANSWER, ANSWER_WORD, GO_ON_OR_STOP = range(3)
_ENDS = {INDEX[EOS], INDEX[";"]}
COPIED = VALUES + COLOURS + ANIMALS + VARIABLES + CANDIDATES
SHARED = 0.6


@dataclass(frozen=True)
class Wording:
    """How a code is told and asked for. A question without "?" runs straight into its answer."""

    line: str
    question: str


# From the barest, where the value follows the key in the document and after the question alike,
# to the one that is served. A model that sees only the last does not begin to match keys.
WORDINGS = [
    Wording("{key} {value} .", "{key}"),
    Wording("{key} is {value} .", "{key} ?"),
    Wording("the code for {key} is {value} .", "what is the code for {key} ?"),
]


def _wording(length: int, rng: Random) -> Wording:
    shares = {64: (60, 25, 15), 128: (30, 35, 35), 256: (10, 20, 70)}.get(length, (3, 7, 90))
    return rng.choices(WORDINGS, weights=shares)[0]


def marker(question: str) -> str:
    """What stands between a question and its answer, a leading space included."""
    return f" {ANSWER}" if question.endswith(("?", ".")) else ""


def _value_words(length: int, rng: Random) -> int:
    return rng.choice((1, 1, 2) if length < 128 else (1, 2, 3) if length < 512 else (2, 3, 3, 3))


def _codes(length: int, rng: Random, most_asked: int, least: float) -> Facts:
    """Needles in one of the wordings, as many as fit (at least a share `least` of that)."""
    size, wording = _value_words(length, rng), _wording(length, rng)
    line = words(wording.line) + size  # {key} is two words, {value} is `size`
    turn = words(wording.question) + size + 3  # with <answer> and <eos>
    asked = min(most_asked, max(1, (length - 2) // (line + turn)))
    most = max(1, min(40, (length - 2 - asked * turn) // line))
    n = rng.randint(max(1, round(least * most)), most)
    pairs = codes(n, rng, rng.random() < SHARED, size)
    lines = [wording.line.format(key=key, value=value) for key, value in pairs]
    rng.shuffle(pairs)
    turns = [Turn(wording.question.format(key=key), value) for key, value in pairs[:asked]]
    return Facts(lines, turns)


def _dense(length: int, rng: Random) -> Facts:
    return _codes(length, rng, 40, 0.6)


def _sparse(length: int, rng: Random) -> Facts:
    return _codes(length, rng, max(1, length // 64), 0.0)


def _single(length: int, rng: Random) -> Facts:
    return needles(length, rng, 1, 1, False, _value_words(length, rng))


def _questions(length: int, rng: Random) -> Facts:
    size = _value_words(length, rng)
    room, each = length - 11, 4 + 5 + size  # an entry in the list and its answer
    asked = rng.randint(2, max(2, min(8, room // (each + CODE_LINE + size))))
    if length >= 1024 and rng.random() < 0.5:
        asked = 8
    most = max(asked, min(24, (room - asked * each) // (CODE_LINE + size)))
    n, shared, sort = rng.randint(asked, most), rng.random() < 0.8, rng.random() < 0.4
    return questions(length, rng, n, asked, shared, size, sort)


def _copy(length: int, rng: Random) -> Facts:
    """Half the passages have words that come again before other words."""
    most = min(64, (length - 16) // 2)
    n = rng.randint(most // 2 if length == FIRST_LENGTH else 4, most)
    pool = COPIED
    if rng.random() < 0.5:
        pool = rng.sample(pool, max(4, n * 2 // 3))
    return copy(length, rng, n, pool)


def _passage(length: int, rng: Random) -> Facts:
    return copy(length, rng, rng.randint(4, min(64, (length - 16) // 2)))


def _votes(length: int, rng: Random) -> Facts:
    return votes(length, rng, rng.randint(3, min(32, (length - 12) // 5)), rng.randint(2, 4))


def _chains(length: int, rng: Random) -> Facts:
    n = 1 if length < 128 else rng.randint(1, 2 if length < 256 else 4)
    return chains(length, rng, n, 0 if length > 64 else 2, n)


def _several(length: int, rng: Random) -> Facts:
    """Facts of two or three tasks in one document, the turns in any order."""
    parts = rng.sample((_dense, _questions, _passage, _votes, _chains), 2 if length < 256 else 3)
    made = [part(max(64, length // (len(parts) + 1)), rng) for part in parts]
    if length < 128:
        made = made[:1]
    facts = Facts([x for m in made for x in m.lines], [t for m in made for t in m.turns])
    if len(set(facts.lines)) < len(facts.lines) and _dense in parts and _questions in parts:
        return _several(length, rng)
    rng.shuffle(facts.turns)
    return facts


KINDS = {
    "dense": _dense, "sparse": _sparse, "single": _single, "questions": _questions,
    "copy": _copy, "votes": _votes, "chains": _chains, "several": _several,
}  # fmt: skip


def _tokens(prompt_turns: Iterable[Turn]) -> int:
    return sum(words(t.question) + words(t.answer) + 2 for t in prompt_turns)


def draw_prompt(kind: str, length: int, rng: Random) -> Prompt:
    """A document and turns that together take at most `length` tokens, nearly always exactly."""
    facts = KINDS[kind](length, rng)
    rng.shuffle(facts.lines)
    lines = sum(map(words, facts.lines)) + FRAME
    while len(facts.turns) > 1 and lines + _tokens(facts.turns) > length:
        facts.turns.pop()
    first = facts.turns[0]
    rest = words(first.answer) + 1 + _tokens(facts.turns[1:])
    return build(kind, facts, max(length - rest, lines + words(first.question)), rng)


def pack(prompt: Prompt, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids `[length]` and, for each, `NO_ANSWER`, `ANSWER_WORD` or `GO_ON_OR_STOP` (`int8`).

    The last are `<eos>` and what stands between the parts of an answer.
    """
    pieces = [
        (f"{BOS} {prompt.text}{marker(prompt.text)}", False),
        (f"{prompt.answer} {EOS}", True),
    ]
    for turn in prompt.later:
        asked = f"{turn.question}{marker(turn.question)}"
        pieces += [(asked, False), (f"{turn.answer} {EOS}", True)]
    ids = np.full(length, INDEX[PAD], dtype=np.int64)
    wanted = np.zeros(length, dtype=np.int8)
    at = 0
    for text, answer in pieces:
        new = [INDEX[w] for w in text.split()][: length - at]
        ids[at : at + len(new)] = new
        if answer:
            wanted[at : at + len(new)] = [GO_ON_OR_STOP if i in _ENDS else ANSWER_WORD for i in new]
        at += len(new)
    return ids, wanted


def batch(
    size: int, length: int, rng: Random, last: bool
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Ids and answer marks `[size, length]`, and the kind of each row. `last`: the last stage."""
    mix = LAST_MIX if last else FIRST_MIX if length == FIRST_LENGTH else MIX
    kinds = rng.choices(list(mix), weights=list(mix.values()), k=size)
    rows = [pack(draw_prompt(kind, length, rng), length) for kind in kinds]
    return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows]), kinds
