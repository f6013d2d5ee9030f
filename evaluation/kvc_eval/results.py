"""Scores, 95 % intervals and real bytes of every cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from kvc_eval.grid import Cell, Grid
from kvc_eval.store import Record

_Z = statistics.NormalDist().inv_cdf(0.975)


def interval(scores: list[float]) -> tuple[float, float]:
    """95 % interval of the mean of scores in [0, 1], of which there is at least one.

    Wilson's (1927) where all scores are 0 or 1, else the normal approximation, cut to [0, 1].
    """
    if set(scores) <= {0, 1}:
        from scipy.stats import binomtest

        low, high = binomtest(int(sum(scores)), len(scores)).proportion_ci(method="wilson")
        return float(low), float(high)
    mean = statistics.fmean(scores)
    half = _Z * statistics.stdev(scores) / math.sqrt(len(scores))
    return max(0.0, mean - half), min(1.0, mean + half)


def summarise(records: Iterable[Record], grid: Grid) -> list[dict[str, Any]]:
    """One JSON object a cell, in the grid's order; cells without any answer are left out.

    ``bytes_before`` and ``bytes_after`` are means over the answers, null where the endpoint does
    not tell; ``kept`` is their quotient. Failed requests are in ``failed`` and in no score.
    """
    by_cell: dict[Cell, list[Record]] = {}
    for record in records:
        by_cell.setdefault(record.cell, []).append(record)
    out = []
    for cell in grid.all_cells():
        mine = sorted(by_cell.get(cell, []), key=lambda record: record.sample)
        answered = [record for record in mine if record.failed is None]
        if answered:
            out.append(_cell(cell, answered, grid.tasks, len(mine) - len(answered)))
    return out


def _cell(
    cell: Cell, answered: list[Record], tasks: tuple[str, ...], failed: int
) -> dict[str, Any]:
    before, after = _mean(answered, "before"), _mean(answered, "after")
    scored = [(record.task, record.score) for record in answered if record.score is not None]
    by_task = {task: [score for of, score in scored if of == task] for task in tasks}
    return {
        **cell._asdict(),
        **_score([score for _, score in scored]),
        "failed": failed,
        "skipped": sum(record.skipped is not None for record in answered),
        "prompt_tokens": _mean(answered, "prompt_tokens"),
        "question_tokens": _mean(answered, "question_tokens"),
        "bytes_before": before,
        "bytes_after": after,
        "kept": round(after / before, 5) if before and after is not None else None,
        "tasks": {task: _score(scores) for task, scores in by_task.items() if scores},
    }


def _score(scores: list[float]) -> dict[str, Any]:
    low, high = interval(scores)
    return {
        "n": len(scores),
        "score": round(statistics.fmean(scores), 5),
        "interval": [round(low, 5), round(high, 5)],
    }


def _mean(records: list[Record], field: str) -> float | None:
    """Mean of a field over the records that have it, None if none has."""
    values = [getattr(record, field) for record in records if getattr(record, field) is not None]
    return round(statistics.fmean(values), 1) if values else None
