"""The cells of one run: policies × rates × lengths × question modes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

OFF = "off"
INSIDE, AFTER, TURNS = "inside", "after", "turns"
QUESTIONS = (INSIDE, AFTER, TURNS)
RATES = (2, 4, 8, 16, 32, 64)


class Cell(NamedTuple):
    """One point of the grid.

    Attributes
    ----------
    length : tokens of the prompts that were asked for; 0 is as long as they are.
    question : INSIDE when document and question are compressed together, AFTER when the
        question is read only after compression, as a later turn's would be; TURNS when they are
        compressed together, beginning with what the chat's turn before has left.
    policy : OFF for the uncompressed cell, whose rate is 1.
    """

    length: int
    question: str
    policy: str
    rate: float

    def knob(self, question_tokens: int | None, answer_tokens: int = 0) -> dict[str, Any]:
        """The request's ``kv_compression``.

        Parameters
        ----------
        question_tokens : of the question and all that follows it; used in AFTER only.
        answer_tokens : how many of the prompt's last tokens are the answer, if it is given
            (`forced.py`). It is read after compression, as if it were decoded.
        """
        if self.policy == OFF:
            return {"rate": 1}
        # Prompts are asked at several rates side by side: what they share must not count.
        knob = {"rate": self.rate, "policy": self.policy, "force": True}
        if self.question == TURNS:
            return knob | {"reuse": "compressed"}
        after = question_tokens if self.question == AFTER else answer_tokens
        return knob | {"question_tokens": after} if after else knob


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is asked. Two runs with equal grids ask the same prompts of the same cells.

    Attributes
    ----------
    n : prompts of every cell, spread evenly over the tasks.
    source : what else the prompts depend on, such as a data file's checksum and its metric.
    forced : whether right answers are put into the model's mouth, rather than decoded.
    commit : of the server's code, where it is known.
    """

    suite: str
    model: str
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    questions: tuple[str, ...]
    policies: tuple[str, ...]
    rates: tuple[float, ...]
    n: int
    seed: int
    source: str = ""
    commit: str = ""
    forced: bool = False

    def cells(self, length: int) -> list[Cell]:
        """All cells of one length, the uncompressed one of each question mode first.

        A policy's rates do not follow each other: what the server remembers of a prompt's scores
        after the first of them is there when the next is asked.
        """
        off = [Cell(length, question, OFF, 1) for question in self.questions]
        return off + [
            Cell(length, question, policy, rate)
            for question in self.questions
            for rate in self.rates
            for policy in self.policies
        ]

    def all_cells(self) -> list[Cell]:
        """The cells of all lengths."""
        return [cell for length in self.lengths for cell in self.cells(length)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, tuples as lists."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }
