"""The embedded model's own tasks: it knows no other words. Exact match of the whole answer."""

from __future__ import annotations

from random import Random

from kvc_recall.tasks import TASKS, sample, words
from kvc_recall.vocabulary import ANSWER
from kvc_server.settings import SettingsError

from kvc_eval.sample import Sample, TokenCounter

_END_OF_SENTENCE = " . "


class Recall:
    """Prompts of `kvc_recall.tasks`, of exactly the length asked for: a word is a token.

    Drawn from random streams seeded with strings, which training never uses.
    """

    name = "recall"
    size = None
    source = ""
    turns = 1

    def __init__(self, tasks: tuple[str, ...] = tuple(TASKS), seed: int = 0):
        self.tasks = tasks
        self._seed = seed

    async def prepare(self, counter: TokenCounter, length: int) -> None:
        pass

    def sample(self, length: int, index: int) -> Sample:
        number, which = divmod(index, len(self.tasks))
        task = self.tasks[which]
        rng = Random(f"evaluation {self._seed} {task} {length} {number}")
        try:
            prompt = sample(task, length, rng)
        except ValueError as error:
            raise SettingsError(f"--length {length} is too short for {task}: {error}") from None
        document, question = prompt.text.rsplit(_END_OF_SENTENCE, 1)
        return Sample(
            task=task,
            document=document + _END_OF_SENTENCE,
            question=question,
            answers=(prompt.answer,),
            metric="exact",
            max_tokens=words(prompt.answer) + 2,
            question_tokens=words(question) + 1,  # and <answer>
            prompt=f"{prompt.text} {ANSWER}",
        )


SUITE = Recall
