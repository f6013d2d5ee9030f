"""Chats with the embedded model: several questions about one document, turn by turn.

As SCBench's multi-turn mode (arXiv 2412.10319): the turns before are there with their right
answers. A task is a turn, so the tables tell accuracy by turn. With ``--question after`` the turns
are questions of their own on one document, its multi-request mode.
"""

from __future__ import annotations

from random import Random

from kvc_recall.tasks import FRAME, Turn, compose, needles, words
from kvc_recall.vocabulary import ANSWER, EOS
from kvc_server.settings import SettingsError

from kvc_eval.sample import Sample, TokenCounter

TURNS = 8
NEEDLES = 16
_TASKS = tuple(f"turn{number}" for number in range(1, TURNS + 1))


class Chats:
    """Chats whose first prompt is exactly as long as asked for; a word is a token."""

    name = "chats"
    size = None
    source = ""

    def __init__(self, tasks: tuple[str, ...] | None = None, seed: int = 0):
        self.tasks = tasks or _TASKS
        if self.tasks != _TASKS[: len(self.tasks)]:
            raise SettingsError(f"--tasks: chats begin with {_TASKS[0]} and leave out no turn")
        self.turns = len(self.tasks)
        self._seed = seed

    async def prepare(self, counter: TokenCounter, length: int) -> None:
        pass

    def sample(self, length: int, index: int) -> Sample:
        number, which = divmod(index, self.turns)
        document, asked = self._chat(length, number)
        turn, before = asked[which], asked[:which]
        said = "".join(f"{each.question} {ANSWER} {each.answer} {EOS} " for each in before)
        return Sample(
            task=self.tasks[which],
            document=f"{document} ",
            question=turn.question,
            answers=(turn.answer,),
            metric="exact",
            max_tokens=words(turn.answer) + 2,
            question_tokens=words(said + turn.question) + 1,  # and <answer>
            prompt=f"{document} {said}{turn.question} {ANSWER}",
            turns=tuple((each.question, each.answer) for each in before),
        )

    def _chat(self, length: int, number: int) -> tuple[str, list[Turn]]:
        rng = Random(f"evaluation {self._seed} chats {length} {number}")
        try:
            facts = needles(length, rng, needles=NEEDLES, questions=TURNS)
            rng.shuffle(facts.lines)
            tokens = length - FRAME - words(facts.turns[0].question)
            return compose(facts, tokens, rng), facts.turns
        except ValueError as error:
            raise SettingsError(f"--length {length} is too short for a chat: {error}") from None


SUITE = Chats
