"""Suites of English prompts that are made, of about as many tokens as are asked for."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import ClassVar

from kvc_server.settings import SettingsError

from kvc_eval.sample import Sample, TokenCounter

#: Makes a prompt whose document is about `words` words long; raises ValueError if none can be.
Generator = Callable[[int, Random], Sample]

_FIRST_TRY_WORDS = 400


class Sized:
    """A suite of `generators`, by the names of their tasks.

    How many tokens a word takes depends on the model and on the task, so two prompts of every
    task are counted by the endpoint first.
    """

    generators: ClassVar[dict[str, Generator]]
    size = None
    source = ""
    turns = 1

    def __init__(self, tasks: tuple[str, ...] | None = None, seed: int = 0):
        self.tasks = tasks or tuple(self.generators)
        self._seed = seed
        self._words: dict[tuple[str, int], int] = {}

    async def prepare(self, counter: TokenCounter, length: int) -> None:
        """Choose every task's words: a line through two sizes and what they were counted as."""
        for task in self.tasks:
            first = _FIRST_TRY_WORDS
            counted = await counter.count_tokens(self._make(task, first, length, 0).text)
            second = max(1, first * length // counted)  # too few: the frame is counted in
            also = await counter.count_tokens(self._make(task, second, length, 0).text)
            slope = (also - counted) / (second - first) if second != first else counted / first
            self._words[task, length] = second + int((length - also) / slope)

    def sample(self, length: int, index: int) -> Sample:
        number, which = divmod(index, len(self.tasks))
        task = self.tasks[which]
        return self._make(task, self._words[task, length], length, number)

    def _make(self, task: str, words: int, length: int, number: int) -> Sample:
        rng = Random(f"evaluation {self._seed} {task} {length} {number}")
        try:
            return self.generators[task](words, rng)
        except ValueError as error:
            raise SettingsError(f"--length {length} is too short for {task}: {error}") from None
