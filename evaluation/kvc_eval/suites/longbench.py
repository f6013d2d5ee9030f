"""A JSONL file in LongBench's format (arXiv 2308.14508), given by the user.

A line is an object with ``context``, ``input`` and ``answers``, and where they matter
``dataset`` and ``all_classes``; other fields are ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

from kvc_server.settings import SettingsError

from kvc_eval.sample import Sample, TokenCounter


@dataclasses.dataclass(frozen=True)
class Style:
    """How a metric's questions are put when the user gives no prompt, and how long answers get."""

    template: str
    max_tokens: int


STYLES = {
    "f1": Style("{context}\n\nQuestion: {input}\nAnswer with a few words of the text.", 64),
    "rouge_l": Style("{context}\n\n{input}\nAnswer with a summary of what matters for this.", 512),
    "accuracy": Style("{context}\n{input}", 64),
    "numbers": Style("{context}\n\n{input}\nAnswer with the number only.", 32),
    "edit_similarity": Style("{context}{input}\nWrite the next line of code and nothing else.", 64),
}
#: LongBench's English and code sets. Chinese ones need a word splitter that we do not bring.
METRIC_OF = {
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique",
         "triviaqa", "nq"),
        "f1",
    ),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), "rouge_l"),
    **dict.fromkeys(("passage_count", "passage_retrieval_en"), "numbers"),
    **dict.fromkeys(("lcc", "repobench-p"), "edit_similarity"),
    "trec": "accuracy",
}  # fmt: skip
#: Their contexts are examples of questions and answers; a model may go on with the next one.
FEW_SHOT = ("trec", "triviaqa", "samsum")


class LongBench:
    """The file's rows, those of each data set in turn.

    Parameters
    ----------
    data : the JSONL file.
    metric : for all rows; None takes LongBench's own metric of each row's ``dataset``.
    prompts : a JSON object from data sets to templates with ``{context}`` and ``{input}``,
        such as LongBench's own ``dataset2prompt.json``; what follows the context is the
        question.

    Raises SettingsError, naming the line, for a file that cannot be used.
    """

    name = "longbench"
    turns = 1

    def __init__(self, data: Path, metric: str | None = None, prompts: Path | None = None):
        self._templates = _json(prompts.read_text(), str(prompts)) if prompts else {}
        rows = [
            self._row(line, f"--data {data}, line {number}", metric)
            for number, line in enumerate(_read(data).splitlines(), start=1)
            if line.strip()
        ]
        if not rows:
            raise SettingsError(f"--data {data} is empty")
        self.tasks = tuple(dict.fromkeys(row.task for row in rows))
        by_task = [[row for row in rows if row.task == task] for task in self.tasks]
        turns = itertools.zip_longest(*by_task)
        self._rows = [row for turn in turns for row in turn if row is not None]
        self._characters_per_token = 0.0
        self.source = hashlib.sha256(
            json.dumps([dataclasses.asdict(row) for row in self._rows]).encode()
        ).hexdigest()[:16]

    @property
    def size(self) -> int:
        return len(self._rows)

    async def prepare(self, counter: TokenCounter, length: int) -> None:
        """Characters per token, from the beginning of the longest row."""
        if length and not self._characters_per_token:
            longest = max((row.document for row in self._rows), key=len)
            some = longest[: 2 * length]
            self._characters_per_token = len(some) / await counter.count_tokens(some)

    def sample(self, length: int, index: int) -> Sample:
        """Row `index`; a longer one loses the middle of its document, as in LongBench."""
        row = self._rows[index]
        if not length:
            return row
        room = int(length * self._characters_per_token) - len(row.question)
        if room < 2:
            raise SettingsError(f"--length {length} is too short for the questions of {row.task}")
        if len(row.document) <= room:
            return row
        half = room // 2
        document = row.document[:half] + row.document[-half:]
        return dataclasses.replace(row, document=document)

    def _row(self, line: str, where: str, metric: str | None) -> Sample:
        row = _json(line, where)
        context, question = _text(row, "context", where), _text(row, "input", where)
        answers = row.get("answers")
        if not (isinstance(answers, list) and answers and all(map(_is_text, answers))):
            raise SettingsError(f"{where}: answers must be a list of at least one string")
        dataset = str(row.get("dataset") or "longbench").removesuffix("_e")
        metric = metric or METRIC_OF.get(dataset)
        if metric is None:
            raise SettingsError(
                f"{where}: no metric is known for the data set {dataset!r}; give one with --metric"
            )
        classes = tuple(row.get("all_classes") or ())
        if metric == "accuracy" and not classes:
            raise SettingsError(f"{where}: all_classes must list the labels to choose from")
        template = self._templates.get(dataset, STYLES[metric].template)
        before, found, after = template.partition("{context}")
        if not found:
            raise SettingsError(f"--prompts: the template of {dataset} lacks {{context}}")
        return Sample(
            task=dataset,
            document=before + context,
            question=after.replace("{input}", question),
            answers=tuple(answers),
            metric=metric,
            max_tokens=STYLES[metric].max_tokens,
            classes=classes,
            first_line=dataset in FEW_SHOT,
        )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--data: cannot read {path}: {error}") from None


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError(f"{where}: must be a JSON object")
    return value


def _text(row: dict[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str):
        raise SettingsError(f"{where}: {field} must be a string")
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


SUITE = LongBench
