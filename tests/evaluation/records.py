"""A small grid, and answers of its cells."""

from __future__ import annotations

from kvc_eval.grid import Cell, Grid
from kvc_eval.store import Record

GRID = Grid(
    suite="recall", model="recall", tasks=("single", "votes"), lengths=(1024,),
    questions=("inside", "after"), policies=("kv-compress", "random"), rates=(2.0, 8.0), n=4,
    seed=0,
)  # fmt: skip


def record(policy: str = "kv-compress", rate: float = 8, sample: int = 0, **fields) -> Record:
    cell = Cell(1024, "inside", policy, rate)
    task = GRID.tasks[sample % 2]
    return Record(cell, sample, task, **{"score": 1.0, "before": 100, "after": 20} | fields)


def failure(sample: int) -> Record:
    return record(sample=sample, score=None, before=None, after=None, failed="HTTP 500: no")
