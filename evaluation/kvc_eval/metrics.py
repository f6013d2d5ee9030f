"""Scores in [0, 1] of an answer. F1 and ROUGE-L are rouge-score's, edit similarity RapidFuzz's.

Every metric takes the answer, the expected answers and the labels to choose from (for
``accuracy`` alone). LongBench's (arXiv 2308.14508) count the best of the expected answers.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable
from typing import TYPE_CHECKING

from rapidfuzz import fuzz

from kvc_eval.sample import Sample

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Metric = Callable[[str, tuple[str, ...], tuple[str, ...]], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(sample: Sample, answer: str) -> float:
    """The score of `answer` by the sample's metric."""
    if sample.first_line:
        answer = answer.strip().partition("\n")[0]
    return METRICS[sample.metric](answer, sample.answers, sample.classes)


def exact(answer: str, expected: tuple[str, ...], _: tuple[str, ...]) -> float:
    """1 if the whole answer is one that is expected, word for word."""
    return float(any(answer.split() == right.split() for right in expected))


def string_match(answer: str, expected: tuple[str, ...], _: tuple[str, ...]) -> float:
    """Share of the expected strings that the answer contains (RULER, arXiv 2404.06654)."""
    found = sum(right.lower() in answer.lower() for right in expected)
    return found / len(expected)


def f1(answer: str, expected: tuple[str, ...], _: tuple[str, ...]) -> float:
    """Harmonic mean of precision and recall of the words, as a bag (LongBench's QA F1).

    As in SQuAD, case, punctuation and articles do not count. It is ROUGE-1's F-measure on words.
    """
    scorer = _rouge("rouge1")
    return max(scorer.score(right, answer)["rouge1"].fmeasure for right in expected)


def rouge_l(answer: str, expected: tuple[str, ...], _: tuple[str, ...]) -> float:
    """F-measure of the longest common subsequence of words, without stemming."""
    scorer = _rouge("rougeL")
    return max(scorer.score(right, answer)["rougeL"].fmeasure for right in expected)


def accuracy(answer: str, expected: tuple[str, ...], classes: tuple[str, ...]) -> float:
    """1 / how many labels the answer names, if the right one is among them (LongBench).

    A label that is a part of the right one does not count as named beside it.
    """
    scores = [0.0]
    for right in expected:
        named = [label for label in classes if label in answer]
        named = [label for label in named if label == right or label not in right]
        if right in named:
            scores.append(1 / len(named))
    return max(scores)


def numbers(answer: str, expected: tuple[str, ...], _: tuple[str, ...]) -> float:
    """Share of the answer's numbers that are the right one (LongBench's retrieval and count)."""
    given = re.findall(r"\d+", answer)
    if not given:
        return 0.0
    rights = [re.findall(r"\d+", right)[:1] for right in expected]
    return max(given.count(right[0]) / len(given) if right else 0.0 for right in rights)


def edit_similarity(answer: str, expected: tuple[str, ...], _: tuple[str, ...]) -> float:
    """1 - edit distance / both lengths, of the answer's first line of code (LongBench).

    Lines that hold a back-tick, ``#`` or ``//`` are taken for talk about the code.
    """
    lines = answer.strip("\n").split("\n")
    code = next((line for line in lines if not re.search("`|#|//", line)), "")
    return max(fuzz.ratio(code, right) / 100 for right in expected)


METRICS: dict[str, Metric] = {
    "exact": exact,
    "string_match": string_match,
    "f1": f1,
    "rouge_l": rouge_l,
    "accuracy": accuracy,
    "numbers": numbers,
    "edit_similarity": edit_similarity,
}


class _Words:
    """Tokenizer for rouge-score: words as SQuAD normalises them."""

    def tokenize(self, text: str) -> list[str]:
        return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


@functools.cache
def _rouge(kind: str) -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer  # takes seconds

    return RougeScorer([kind], tokenizer=_Words() if kind == "rouge1" else None)
