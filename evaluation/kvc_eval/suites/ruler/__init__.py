"""RULER-style tasks (arXiv 2404.06654) in English, for real models. A generator a file or a few.

The wording and the filler are our own; what is hidden, how often, and the score (share of the
expected strings that the answer contains) are the paper's unless a generator says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvc_server.settings import SettingsError

from kvc_eval.sample import Sample, TokenCounter
from kvc_eval.suites.ruler import copying, frequency, needles, tracking

#: Makes a prompt whose document is about `words` words long; raises ValueError if none can be.
Generator = Callable[[int, Random], Sample]

GENERATORS: dict[str, Generator] = {
    "niah_single": needles.single,
    "niah_multikey": needles.multikey,
    "niah_multivalue": needles.multivalue,
    "niah_multiquery": needles.multiquery,
    "vt": tracking.variables,
    "cwe": frequency.common,
    "fwe": frequency.frequent,
    "copy": copying.copy,
}
_FIRST_TRY_WORDS = 400


class Ruler:
    """Prompts of about the length asked for.

    How many tokens a word takes depends on the model and on the task, so two prompts of every
    task are counted by the endpoint first.
    """

    name = "ruler"
    size = None
    source = ""

    def __init__(self, tasks: tuple[str, ...] = tuple(GENERATORS), seed: int = 0):
        self.tasks = tasks
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
            return GENERATORS[task](words, rng)
        except ValueError as error:
            raise SettingsError(f"--length {length} is too short for {task}: {error}") from None


SUITE = Ruler
