"""The cells of one run."""

from __future__ import annotations

from tests.evaluation.records import GRID


def test_the_grid_asks_everything_and_uncompressed_first() -> None:
    cells = GRID.cells(1024)
    assert len(cells) == len(set(cells)) == 2 + 2 * 2 * 2
    assert [cell.policy for cell in cells[:3]] == ["off", "off", "kv-compress"]
    assert cells[0].knob(9) == {"rate": 1}
    knobs = [cell.knob(9) for cell in cells if cell.policy == "random" and cell.rate == 8]
    plain = {"rate": 8, "policy": "random", "force": True}
    assert knobs == [plain, plain | {"question_tokens": 9}]
