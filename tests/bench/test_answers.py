"""What `bench.offline` makes of answers: records on disk, grades, intervals, and the oracle."""

from __future__ import annotations

import argparse

import pytest
from kvc_recall import model_path
from transformers import AutoTokenizer

from bench.answers import Records, grade, interval
from bench.offline import MaskedModel, asked
from sgl_kvc.spec import OFF, parse


class Letters:
    """A tokenizer of one letter a token."""

    @staticmethod
    def decode(tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_records_are_found_by_the_next_run(tmp_path):
    file = tmp_path / "records.jsonl"
    first = Records(file)
    first[["numbers", 840, 7]] = None
    first[[["numbers", 840, 8], {"rate": 4}]] = {"right": True}
    second = Records(file)
    assert ["numbers", 840, 7] in second
    assert second[["numbers", 840, 7]] is None
    assert second[[["numbers", 840, 8], {"rate": 4}]] == {"right": True}
    assert [["numbers", 840, 8], {"rate": 8}] not in second


@pytest.mark.parametrize(
    ("forced", "generated", "expected"),
    [
        ("it is 12", "it is 12", {"right": True, "same": True, "forced": 1.0}),
        ("So is 12", "So: 12", {"right": True, "same": False, "forced": 1.0}),
        ("it is 13", "it is 13", {"right": False, "same": False, "forced": 0.5}),
    ],
)
def test_an_answer_may_be_right_in_other_words(forced, generated, expected):
    got = {"forced": letters(forced), "generated": letters(generated)}
    assert grade(Letters, letters("it is 12"), "12", got) == expected


def test_wilsons_interval():
    low, high = interval(95, 100)
    assert (round(low, 3), round(high, 3)) == (0.888, 0.978)
    assert interval(0, 20)[0] == pytest.approx(0)


def test_answers_go_on_after_the_first_other_word():
    """As if generated from the beginning; and the oracle keeps what the answer needs."""
    masked, tokenizer = MaskedModel(model_path()), AutoTokenizer.from_pretrained(model_path())
    args = argparse.Namespace(task="questions8", tokens=512)
    right = {False: 0, True: 0}
    for seed in range(4):
        tokens, document, answer = asked(args, tokenizer, seed)
        said = masked.generate(tokens, OFF, len(answer.split()))
        for knob in ({"rate": 16}, {"rate": 16, "question_tokens": len(tokens) - document}):
            spec = parse(knob)
            plain = masked.answer(tokens, spec, said, len(said))
            generated = masked.generate(tokens, spec, len(said))
            assert plain["generated"] == generated[: len(plain["generated"])]
            assert len(plain["generated"]) == len(generated)
            for oracle in (False, True):
                got = masked.answer(tokens, spec, said, len(said), oracle)
                right[oracle] += got["forced"] == said
    assert right[True] >= 7
    assert right[False] <= 5
