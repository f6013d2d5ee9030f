"""The embedded model's own tasks as prompts."""

from __future__ import annotations

import re

from kvc_eval.suites.recall import Recall
from kvc_recall.tasks import words


def test_neighbouring_prompts_are_of_all_tasks() -> None:
    suite = Recall()
    tasks = [suite.sample(1024, index).task for index in range(len(suite.tasks))]
    assert tuple(tasks) == suite.tasks
    first, again = suite.sample(1024, 0), suite.sample(1024, len(suite.tasks))
    assert first.task == again.task
    assert first != again


def test_recall_prompts_are_exact_and_split_before_the_question() -> None:
    suite = Recall(seed=5)
    for index in range(len(suite.tasks)):
        made = suite.sample(1024, index)
        assert words(made.prompt) + 1 == 1024  # and <bos>
        assert made.prompt == f"{made.text} <answer>"
        assert made.document.endswith(" . ")
        assert re.match("(what|who|please) ", made.question)
        assert made.question_tokens == len(made.question.split()) + 1
        assert made != Recall(seed=6).sample(1024, index)
