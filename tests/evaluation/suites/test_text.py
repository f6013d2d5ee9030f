"""Natural text: the answers are in it, and follow from nothing else."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from kvc_eval.metrics import score
from kvc_eval.suites.text import GENERATORS, Text, passages

from tests.evaluation.suites.counters import WordCounter


@pytest.mark.parametrize("task", GENERATORS)
@pytest.mark.parametrize("words", [300, 3000])
def test_tasks_are_deterministic_and_as_long_as_asked(task: str, words: int) -> None:
    made = GENERATORS[task](words, Random("a"))
    assert made == GENERATORS[task](words, Random("a"))
    assert made != GENERATORS[task](words, Random("b"))
    assert made.task == task
    assert abs(len(made.document.split()) - words) <= 40, "half of the longest sentence"
    assert score(made, made.answers[0]) == 1
    assert score(made, "I do not know") == 0


@pytest.mark.parametrize("task", GENERATORS)
def test_the_answer_follows_its_lead_in_the_document_and_nowhere_else(task: str) -> None:
    for seed in range(20):
        made = GENERATORS[task](400, Random(seed))
        (answer,) = made.answers
        assert made.document.count(f"{made.lead} {answer}") == 1
        assert made.document.count(made.lead) == 1
        said = "".join(message["content"] for message in made.messages[1:])
        assert answer not in said.replace(made.document, "")
        before = made.document[: made.document.index(made.lead)]
        assert len(before.split()) >= passages.CLEAR_WORDS


def test_turns_ask_for_one_fact_after_the_other() -> None:
    made = GENERATORS["turns"](400, Random(1))
    roles = [message["role"] for message in made.messages]
    assert roles == ["user", "assistant"] * 2 + ["user"]
    assert made.messages[0]["content"] == made.document + made.turns[0][0]
    assert all(answer in made.document for _, answer in made.turns)
    assert len({question for question, _ in made.turns} | {made.question}) == 3


def test_the_text_is_long_and_split_at_ends_of_sentences() -> None:
    found = passages.sentences()
    assert len(passages.FILE.read_bytes()) >= 64 << 10
    assert len(found) > 1000
    assert all(sentence[0].isupper() or not sentence[0].isalpha() for sentence in found)
    assert not [sentence for sentence in found if sentence.endswith((" Gen.", " St.", " L."))]
    assert "public domain" in passages.FILE.read_text().splitlines()[2]


def test_a_passage_goes_on_at_the_beginning() -> None:
    everything = sum(len(sentence.split()) for sentence in passages.sentences())
    text = passages.passage(everything + 500, Random(0))
    assert abs(sum(len(sentence.split()) for sentence in text) - everything - 500) <= 40


@pytest.mark.parametrize("length", [1000, 4096])
def test_the_suite_is_sized_by_what_the_endpoint_counts(length: int) -> None:
    suite, counter = Text(), WordCounter()
    asyncio.run(suite.prepare(counter, length))
    for index in range(2 * len(GENERATORS)):
        made = suite.sample(length, index)
        counted = asyncio.run(counter.count_tokens(made.text))
        assert abs(counted - length) < 0.12 * length, "words of natural text differ in length"
