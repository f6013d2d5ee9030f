"""Tables and curves."""

from __future__ import annotations

import json
from pathlib import Path

from kvc_eval import figure, report
from kvc_eval.results import summarise

from tests.evaluation.records import GRID, failure, record


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
