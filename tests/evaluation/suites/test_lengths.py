"""A prompt that does not fit in the length asked for is refused by name."""

from __future__ import annotations

import asyncio

import pytest
from kvc_eval.suites.recall import Recall
from kvc_eval.suites.ruler import Ruler
from kvc_server.settings import SettingsError

from tests.evaluation.suites.counters import WordCounter


@pytest.mark.parametrize(
    ("kind", "task", "length"), [(Recall, "needles32", 100), (Ruler, "vt", 60), (Ruler, "cwe", 90)]
)
def test_what_does_not_fit_is_said(kind: type, task: str, length: int) -> None:
    suite = kind((task,))

    def make() -> None:
        asyncio.run(suite.prepare(WordCounter(), length))
        suite.sample(length, 0)

    with pytest.raises(SettingsError, match=f"--length {length} is too short for {task}"):
        make()
