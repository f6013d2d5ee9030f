"""One prompt of a suite, with document and question apart, and what answer is right."""

from __future__ import annotations

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt and its expected answers.

    Attributes
    ----------
    document, question : the user message is `document` + `question`, so the space or line
        break between them belongs to one of the two.
    answers : what is expected; how several count is the metric's business.
    metric : name of the function in `metrics.METRICS` that scores an answer.
    max_tokens : tokens the answer may take.
    classes : labels to choose from, for the metric ``accuracy``.
    first_line : whether only the answer's first line counts.
    question_tokens : tokens from the question's first to the prompt's last, the chat
        template's included, where they are known without asking.
    prompt : the prompt as the chat template renders it, less the token the tokenizer puts
        first, where that is known; such prompts can be sent many at a time.
    turns : questions and answers that came before `question`, the first of them right behind the
        document.
    lead : how a right answer begins, before what is asked for. With it the answer can be put into
        the model's mouth (`forced.py`): `lead`, a space, ``answers[0]``.
    """

    task: str
    document: str
    question: str
    answers: tuple[str, ...]
    metric: str
    max_tokens: int
    classes: tuple[str, ...] = ()
    first_line: bool = False
    question_tokens: int | None = None
    prompt: str | None = None
    turns: tuple[tuple[str, str], ...] = ()
    lead: str = ""

    @property
    def text(self) -> str:
        """The user message; of several turns, all that is said."""
        said = "".join(question + answer for question, answer in self.turns)
        return self.document + said + self.question

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat that ends with the question."""
        asked = [*(question for question, _ in self.turns), self.question]
        asked[0] = self.document + asked[0]
        out = []
        for question, (_, answer) in zip(asked, self.turns, strict=False):
            out += [message("user", question), message("assistant", answer)]
        return [*out, message("user", asked[-1])]

    @property
    def before_questions(self) -> list[dict[str, str]]:
        """A chat that is the same up to the document's end, and goes on differently."""
        return [message("user", self.document + "\n")]

    def answered(self, text: str) -> list[dict[str, str]]:
        """The chat with the beginning of an answer."""
        return [*self.messages, message("assistant", text)]


def message(role: str, content: str) -> dict[str, str]:
    """A message of a chat."""
    return {"role": role, "content": content}


class TokenCounter(Protocol):
    """What a suite may ask of the endpoint before it makes prompts."""

    async def count_tokens(self, text: str) -> int:
        """Prompt tokens of `text` as a user message, the chat template's included."""
        ...


class Suite(Protocol):
    """A source of prompts; the same arguments always give the same prompts.

    Attributes
    ----------
    source : what the prompts depend on besides tasks and seed, such as a file's checksum.
    turns : of a chat, whose neighbouring indices they are; 1 where prompts are by themselves.
    """

    name: str
    tasks: tuple[str, ...]
    source: str
    turns: int

    @property
    def size(self) -> int | None:
        """How many prompts there are; None when they are made without end."""
        ...

    async def prepare(self, counter: TokenCounter, length: int) -> None:
        """Find out what `sample` has to know for this length. Raises SettingsError."""
        ...

    def sample(self, length: int, index: int) -> Sample:
        """Prompt number `index` of about `length` tokens; 0 means as long as it is.

        Neighbouring indices are of different tasks, so that any first n are spread over them
        evenly. Raises SettingsError when a task does not fit in `length`.
        """
        ...
