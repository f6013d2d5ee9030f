"""A file in LongBench's format."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from kvc_eval.suites.longbench import LongBench
from kvc_server.settings import SettingsError

from tests.evaluation.suites.counters import WordCounter


def row(**fields: object) -> str:
    return json.dumps(
        {"context": "Anna lives in Rome.", "input": "Where?", "answers": ["Rome"],
         "dataset": "qasper", "all_classes": None, "length": 5} | fields
    )  # fmt: skip


def longbench(folder: Path, *lines: str, **options: object) -> LongBench:
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return LongBench(path, **options)


def test_longbench_rows_take_turns_by_data_set(tmp_path: Path) -> None:
    classes = ["cat", "dog"]
    suite = longbench(
        tmp_path, row(), row(input="Who?"), row(dataset="trec", all_classes=classes),
        row(dataset="lcc_e", input=""),
    )  # fmt: skip
    made = [suite.sample(0, index) for index in range(suite.size)]
    assert [one.task for one in made] == ["qasper", "trec", "lcc", "qasper"]
    assert [one.metric for one in made] == ["f1", "accuracy", "edit_similarity", "f1"]
    assert made[1].classes == ("cat", "dog")
    assert made[0].document.endswith("Anna lives in Rome.")
    assert "Where?" in made[0].question
    assert made[0].document + made[0].question == made[0].text


def test_longbench_prompts_and_metric_of_the_user(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"qasper": "Read. {context} Then: {input} Go."}))
    suite = longbench(tmp_path, row(), metric="rouge_l", prompts=prompts)
    made = suite.sample(0, 0)
    assert (made.document, made.question) == ("Read. Anna lives in Rome.", " Then: Where? Go.")
    assert made.metric == "rouge_l"


def test_long_rows_lose_their_middle(tmp_path: Path) -> None:
    text = "".join(f"{i:04} " for i in range(2000))
    suite = longbench(tmp_path, row(context=text))
    asyncio.run(suite.prepare(WordCounter(), 500))
    made = suite.sample(500, 0)
    assert asyncio.run(WordCounter().count_tokens(made.text)) == pytest.approx(500, abs=25)
    assert made.document.startswith("0000 0001")
    assert made.document.endswith("1998 1999 ")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be a JSON object"),
        (row(context=None), "line 2: context must be a string"),
        (row(answers=[]), "line 2: answers must be a list"),
        (row(dataset="vcsum"), "line 2: no metric is known for the data set 'vcsum'"),
        (row(dataset="trec"), "line 2: all_classes must list"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(problem)):
        longbench(tmp_path, row(), line)
