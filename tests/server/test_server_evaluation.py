"""The parts of `sgl-kvc eval` that need no server: prompts, scores, intervals, what is stored."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from kvc_server.cli import main
from kvc_server.evaluation import figure, report
from kvc_server.evaluation.grid import Cell, Grid
from kvc_server.evaluation.metrics import METRICS, score
from kvc_server.evaluation.results import interval, summarise
from kvc_server.evaluation.sample import Sample
from kvc_server.evaluation.store import ANSWERS, Record, Store
from kvc_server.evaluation.suites.longbench import LongBench
from kvc_server.evaluation.suites.recall import Recall
from kvc_server.evaluation.suites.ruler import GENERATORS, Ruler
from kvc_server.settings import SettingsError

GRID = Grid(
    suite="recall", model="recall", tasks=("single", "votes"), lengths=(1024,),
    questions=("inside", "after"), policies=("kv-compress", "random"), rates=(2.0, 8.0), n=4,
    seed=0,
)  # fmt: skip


class WordCounter:
    """An endpoint whose tokens are characters in threes, and a frame of 11."""

    async def count_tokens(self, text: str) -> int:
        return 11 + len(text) // 3


# --- generators ----------------------------------------------------------------------------


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


def test_neighbouring_prompts_are_of_all_tasks() -> None:
    suite = Recall()
    tasks = [suite.sample(1024, index).task for index in range(len(suite.tasks))]
    assert tuple(tasks) == suite.tasks
    first, again = suite.sample(1024, 0), suite.sample(1024, len(suite.tasks))
    assert first.task == again.task
    assert first != again


def test_recall_prompts_are_exact_and_split_before_the_question() -> None:
    from kvc_recall.tasks import words

    suite = Recall(seed=5)
    for index in range(len(suite.tasks)):
        made = suite.sample(1024, index)
        assert words(made.prompt) + 1 == 1024  # and <bos>
        assert made.prompt == f"{made.text} <answer>"
        assert made.document.endswith(" . ")
        assert re.match("(what|who|please) ", made.question)
        assert made.question_tokens == len(made.question.split()) + 1
        assert made != Recall(seed=6).sample(1024, index)


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


# --- LongBench -----------------------------------------------------------------------------


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


# --- metrics -------------------------------------------------------------------------------


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


# --- results -------------------------------------------------------------------------------


def test_intervals() -> None:
    assert interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson
    assert interval([1.0] * 10) == pytest.approx((0.7225, 1), abs=1e-4)
    # mean 0.5, standard deviation 0.1: 0.5 ± 1.96 · 0.1 / 2
    scores = [0.4, 0.6, 0.5 - 0.1 / 2**0.5, 0.5 + 0.1 / 2**0.5]
    assert interval(scores) == pytest.approx((0.4020, 0.5980), abs=1e-4)


def record(policy: str = "kv-compress", rate: float = 8, sample: int = 0, **fields) -> Record:
    cell = Cell(1024, "inside", policy, rate)
    task = GRID.tasks[sample % 2]
    return Record(cell, sample, task, **{"score": 1.0, "before": 100, "after": 20} | fields)


def failure(sample: int) -> Record:
    return record(sample=sample, score=None, before=None, after=None, failed="HTTP 500: no")


def test_a_summary_counts_what_was_answered() -> None:
    records = [
        record(), record(sample=1, score=0.0, after=40), failure(2),
        record(sample=3, after=100, skipped="too short"), record("off", 1, after=100),
    ]  # fmt: skip
    off, cell = summarise(records, GRID)
    assert off["policy"] == "off"
    assert (cell["n"], cell["failed"], cell["skipped"]) == (3, 1, 1)
    assert cell["score"] == pytest.approx(2 / 3, abs=1e-5)
    assert cell["kept"] == pytest.approx(160 / 300, abs=1e-3)
    assert cell["tasks"]["votes"] == {"n": 2, "score": 0.5, "interval": [0.09453, 0.90547]}


def test_the_grid_asks_everything_and_uncompressed_first() -> None:
    cells = GRID.cells(1024)
    assert len(cells) == len(set(cells)) == 2 + 2 * 2 * 2
    assert [cell.policy for cell in cells[:3]] == ["off", "off", "kv-compress"]
    assert cells[0].knob(9) == {"rate": 1}
    knobs = [cell.knob(9) for cell in cells if cell.policy == "random" and cell.rate == 8]
    plain = {"rate": 8, "policy": "random"}
    assert knobs == [plain, plain | {"question_tokens": 9}]


def test_a_store_goes_on_where_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path, GRID)
    store.add([record(), record(sample=1, answer="x y", question_tokens=9), failure(2)])
    with (tmp_path / ANSWERS).open("a") as file:
        file.write('{"cell": [1024, "ins')  # killed while writing
    again = Store(tmp_path, GRID)
    assert again.records() == store.records()
    cell = record().cell
    assert [again.has(cell, sample) for sample in range(4)] == [True, True, False, False]
    again.add([record(sample=2)])
    assert Store(tmp_path, GRID).has(cell, 2)
    assert len(Store(tmp_path, GRID).records()) == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [({"n": 5}, "another n: 4, now 5"), ({"rates": (2.0,)}, r"another rates: [2.0, 8.0], now")],
)
def test_a_folder_of_another_run_is_refused(tmp_path: Path, change: dict, named: str) -> None:
    Store(tmp_path, GRID)
    other = Grid(**{**GRID.__dict__, **change})
    with pytest.raises(SettingsError, match=re.escape(named)):
        Store(tmp_path, other)


# --- the report ----------------------------------------------------------------------------


def test_the_report_names_every_cell_and_failure(tmp_path: Path) -> None:
    records = [record(p, r, i) for p in GRID.policies for r in GRID.rates for i in range(4)]
    records += [record("off", 1, i, after=100) for i in range(4)] + [failure(3)]
    done = {
        "command": "sgl-kvc eval", "compresses": True, "versions": {}, "commit": "c",
        "machine": "m", "seconds": 60, "answers": 20, "answers_in_seconds": 20, "failed": 1,
        "cells": summarise({r.key: r for r in records}.values(), GRID),
    }  # fmt: skip
    report.write(tmp_path, done, GRID)
    page = (tmp_path / report.REPORT).read_text()
    assert "| random | 1.000 (0.510 to 1.000) at 20 % |" in page
    assert "**1 requests failed**" in page
    assert page.count("### votes") == 1
    picture = tmp_path / report.picture(1024, "inside")
    assert f"({picture.name})" in page
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / report.picture(1024, "after")).exists()
    assert json.loads((tmp_path / report.RESULTS).read_text()) == done


def test_forty_policies_have_forty_lines() -> None:
    styles = [
        (style["color"], style["linestyle"], style["marker"])
        for style, _ in zip(figure._line_styles(), range(40), strict=False)
    ]
    assert len(set(styles)) == 40


# --- the command line ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give either --url or --embedded"),
        (["--url", "http://a", "--embedded"], "give either --url or --embedded"),
        (["--url", "http://a", "--", "--tp", "2"], "arguments after --"),
        (["--url", "http://a", "--servers", "2"], "--servers is for --embedded"),
        (["--url", "http://a", "--suite", "longbench"], "--suite longbench and --data"),
        (["--url", "http://a", "--data", "x"], "--suite longbench and --data"),
        (["--url", "http://a", "--metric", "f1"], "--metric is for"),
        (["--url", "http://a", "--rates", "1"], "--rates: 1 is off"),
        (["--url", "http://a", "--rates", "0.5"], "--rates: must be at least 1"),
        (["--url", "http://a", "--n", "0"], "--n must be at least 1"),
        (["--url", "http://a", "--length", "0"], "--length must be at least 1"),
        (["--url", "http://a", "--tasks", "fly"], "--tasks: unknown task fly; known are niah_"),
        (["--url", "http://a", "--suite", "longbench", "--data", "/none"], "--data: cannot read"),
    ],
)
def test_bad_options_end_in_one_sentence(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"sgl-kvc eval: {problem}")
    assert printed.count("\n") == 1


def test_the_evaluation_never_imports_torch() -> None:
    code = (
        "import sys, kvc_server.evaluation.command\n"
        "from kvc_server.evaluation import metrics, suites\n"
        "[suites.load(name) for name in suites.SUITES]\n"
        "metrics.rouge_l('a', ('a',), ())\n"
        "sys.exit(bool({'torch', 'sglang', 'triton', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
