"""Natural text for real language models, even small ones: see tasks.py for what is asked.

Where the endpoint is ours, answers are put into the model's mouth (`kvc_eval.forced`): exact
answers, the share of right tokens and their likelihood, without decoding.
"""

from __future__ import annotations

from kvc_eval.suites.sized import Generator, Sized
from kvc_eval.suites.text import tasks

GENERATORS: dict[str, Generator] = {
    "numbers": tasks.numbers,
    "names": tasks.names,
    "turns": tasks.turns,
    "quote": tasks.quote,
}


class Text(Sized):
    """Prompts of about the length asked for."""

    name = "text"
    generators = GENERATORS


SUITE = Text
