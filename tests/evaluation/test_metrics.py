"""Scores of answers, by hand."""

from __future__ import annotations

import pytest
from kvc_eval.metrics import METRICS, score
from kvc_eval.sample import Sample


@pytest.mark.parametrize(
    ("metric", "answer", "expected", "value"),
    [
        ("exact", " tango  seven\n", ["tango seven"], 1),
        ("exact", "tango seven kilo", ["tango seven"], 0),
        ("string_match", "They are 11 and 22.", ["11", "22", "33", "44"], 0.5),
        ("string_match", "ALPHA", ["alpha"], 1),
        # 2 of 3 words right, 2 of 2 found: P = 2/3, R = 1
        ("f1", "The Old, old house!", ["a house old"], 0.8),
        ("f1", "no idea", ["Rome", "no"], 2 / 3),
        ("f1", "", ["Rome"], 0),
        # longest common subsequence "police the gunman" of 4 and 4 words
        ("rouge_l", "police kill the gunman", ["police killed the gunman"], 0.75),
        ("rouge_l", "the gunman police killed", ["police killed the gunman"], 0.5),
        ("accuracy", "It is a dog.", ["dog"], 1),
        ("accuracy", "a dog or a cat", ["dog"], 0.5),
        ("accuracy", "a cat", ["dog"], 0),
        ("accuracy", "a hot dog", ["hot dog"], 1),
        ("numbers", "Paragraph 12", ["Paragraph 12"], 1),
        ("numbers", "12, or 7, or 12", ["Paragraph 12"], 2 / 3),
        ("numbers", "none", ["3"], 0),
        # insertions and deletions: 2 of 9 + 9
        ("edit_similarity", "# so:\nreturn x+1\nmore", ["return x+2"], 0.9),
        ("edit_similarity", "```", ["return"], 0),
    ],
)
def test_metrics_by_hand(metric: str, answer: str, expected: list[str], value: float) -> None:
    classes = ("dog", "cat", "hot dog")
    assert METRICS[metric](answer, tuple(expected), classes) == pytest.approx(value)


def test_only_the_first_line_of_few_shot_answers_counts() -> None:
    made = Sample("trec", "", "", ("dog",), "accuracy", 8, ("dog", "cat"), first_line=True)
    assert score(made, "\ndog\nType: cat") == 1
