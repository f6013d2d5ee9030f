"""Tasks after RULER: what is asked follows from the document, and lengths are as asked."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from random import Random

import pytest
from kvc_eval.metrics import score
from kvc_eval.suites.ruler import GENERATORS, Ruler

from tests.evaluation.suites.counters import WordCounter


@pytest.mark.parametrize("task", GENERATORS)
@pytest.mark.parametrize("words", [600, 3000])
def test_generators_are_deterministic_and_as_long_as_asked(task: str, words: int) -> None:
    made = GENERATORS[task](words, Random("a"))
    assert made == GENERATORS[task](words, Random("a"))
    assert made != GENERATORS[task](words, Random("b"))
    assert made.task == task
    assert abs(len(made.document.split()) - words) <= 20 + words // 40
    assert score(made, " ".join(made.answers)) == 1
    assert score(made, "I do not know") == 0


@pytest.mark.parametrize("task", [name for name in GENERATORS if name.startswith("niah")])
def test_needles_follow_from_the_document(task: str) -> None:
    made = GENERATORS[task](500, Random(3))
    found = re.findall(r"One of the magic numbers of (\S+) is (\d{7})\.", made.document)
    assert len(found) == (1 if task == "niah_single" else 4)
    asked = re.search(r"of ([^?]*) in the text above", made.question).group(1)
    keys = re.split(", | and ", asked)
    assert len(keys) == (4 if task == "niah_multiquery" else 1)
    assert {value for key, value in found if key in keys} == set(made.answers)
    assert not any(answer in made.question for answer in made.answers)


def test_variables_follow_from_the_document() -> None:
    made = GENERATORS["vt"](500, Random(3))
    value = re.search(r"value (\d+)", made.question).group(1)
    holds: dict[str, str] = {}
    for name, of in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", made.document):
        holds[name] = holds.get(of, of)  # a chain's links stand in their order
    assert {name for name, of in holds.items() if of == value} == set(made.answers)
    assert len(holds) == 2 * len(made.answers), "another chain is there to tell apart"


@pytest.mark.parametrize("words", [600, 3000, 60_000])
def test_common_words_are_the_most_common(words: int) -> None:
    made = GENERATORS["cwe"](words, Random(3))
    counted = Counter(re.findall(r"\d+\. (\w+)", made.document)).most_common()
    assert {word for word, _ in counted[:10]} == set(made.answers)
    assert counted[9][1] >= 6 * counted[10][1]


def test_frequent_words_are_the_most_frequent() -> None:
    made = GENERATORS["fwe"](600, Random(3))
    text = made.document.split("\n\n")[1].split()
    first, *others = Counter(text).most_common(5)
    assert first[0] == "..."
    assert [word for word, _ in others[:3]] == list(made.answers)
    assert others[2][1] > others[3][1]


def test_the_passage_is_in_the_document() -> None:
    made = GENERATORS["copy"](500, Random(3))
    marked = re.search(r"\[Passage begins\] (.*) \[Passage ends\]", made.document).group(1)
    assert marked == " ".join(made.answers)
    assert score(made, " ".join(made.answers[:3])) == 0.75


@pytest.mark.parametrize("length", [1000, 4096])
def test_ruler_is_sized_by_what_the_endpoint_counts(length: int) -> None:
    suite, counter = Ruler(), WordCounter()
    asyncio.run(suite.prepare(counter, length))
    for index in range(len(GENERATORS)):
        made = suite.sample(length, index)
        counted = asyncio.run(counter.count_tokens(made.text))
        assert abs(counted - length) < 0.05 * length, made.task
