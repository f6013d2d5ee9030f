"""What is stored, and how a run goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvc_eval.grid import Grid
from kvc_eval.store import ANSWERS, Store
from kvc_server.settings import SettingsError

from tests.evaluation.records import GRID, failure, record


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
