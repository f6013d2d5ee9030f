"""answers.jsonl: every answer of a run, appended as it comes, so that a run can go on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvc_server.settings import SettingsError

from kvc_eval.grid import Cell, Grid

ARGUMENTS, ANSWERS = "arguments.json", "answers.jsonl"


@dataclasses.dataclass(frozen=True)
class Record:
    """One answer of one cell, or the failure to get one.

    Attributes
    ----------
    sample : index of the prompt in its suite.
    score : in [0, 1]; None when the request failed.
    prompt_tokens : as the endpoint counted them.
    question_tokens : what the knob said, where the question was asked after.
    before, after : bytes the prompt held in the pool; None where the endpoint does not tell.
    skipped : why the server did not compress, None when it did or was not asked to.
    failed : why there is no answer.
    tokens_right : share of the right answer's tokens that are the likeliest, where the answer was
        given and not decoded (`forced.py`).
    log_likelihood : mean over those tokens, in nats.
    """

    cell: Cell
    sample: int
    task: str
    score: float | None = None
    answer: str | None = None
    prompt_tokens: int | None = None
    question_tokens: int | None = None
    before: int | None = None
    after: int | None = None
    skipped: str | None = None
    failed: str | None = None
    tokens_right: float | None = None
    log_likelihood: float | None = None

    @property
    def key(self) -> tuple[Cell, int]:
        """What tells this answer from all others."""
        return self.cell, self.sample

    def to_line(self) -> str:
        """A line of JSON without what is None."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return json.dumps(fields | {"cell": list(self.cell)}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Record:
        """The inverse of `to_line`."""
        fields = json.loads(line)
        return cls(**fields | {"cell": Cell(*fields["cell"])})


class Store:
    """The answers in a folder. Opened once; `add` appends, nothing is ever rewritten.

    Parameters
    ----------
    folder : made if it is not there. If it holds a run of another grid, SettingsError names
        the first argument that differs.
    """

    def __init__(self, folder: Path, grid: Grid):
        folder.mkdir(parents=True, exist_ok=True)
        self._check(folder, grid.to_json())
        self._path = folder / ANSWERS
        self._records: dict[tuple[Cell, int], Record] = {}
        self._read()

    def has(self, cell: Cell, sample: int) -> bool:
        """Whether there is an answer already; a failure is none."""
        record = self._records.get((cell, sample))
        return record is not None and record.failed is None

    def add(self, records: Iterable[Record]) -> None:
        """Append to the file, and hand it to the operating system."""
        records = list(records)
        with self._path.open("a") as file:
            file.write("".join(record.to_line() for record in records))
        self._records |= {record.key: record for record in records}

    def records(self) -> list[Record]:
        """The last record of every cell and sample."""
        return list(self._records.values())

    def _check(self, folder: Path, grid: dict[str, Any]) -> None:
        path = folder / ARGUMENTS
        if not path.exists():
            path.write_text(json.dumps(grid, indent=1) + "\n")
            return
        before = json.loads(path.read_text())
        for name, value in grid.items():
            if before.get(name) != value:
                raise SettingsError(
                    f"--out: {folder} holds a run with another {name}: {_short(before.get(name))}, "
                    f"now {_short(value)}; give another folder, or remove this one"
                )

    def _read(self) -> None:
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # the run was killed while it wrote
            with self._path.open("r+b") as file:
                file.truncate(whole)
        for line in content[:whole].decode().splitlines():
            record = Record.from_line(line)
            self._records[record.key] = record


def _short(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
