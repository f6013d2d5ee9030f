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

    @property
    def text(self) -> str:
        """The user message."""
        return self.document + self.question


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
    """

    name: str
    tasks: tuple[str, ...]
    source: str

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
