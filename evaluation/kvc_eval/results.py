"""Scores, 95 % intervals and real bytes of every cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from kvc_eval.grid import OFF, Cell, Grid
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
    mean, half = _normal(scores)
    return max(0.0, mean - half), min(1.0, mean + half)


def _normal(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval by the normal approximation; infinite for one."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    return mean, _Z * statistics.stdev(values) / math.sqrt(len(values))


def summarise(records: Iterable[Record], grid: Grid) -> list[dict[str, Any]]:
    """One JSON object a cell, in the grid's order; cells without any answer are left out.

    ``bytes_before`` and ``bytes_after`` are means over the answers, null where the endpoint does
    not tell; ``kept`` is their quotient. Failed requests are in ``failed`` and in no score.
    ``of_right`` is the score of the prompts that are answered right uncompressed. Where answers
    were given and not decoded, ``tokens_right`` is the mean share of their tokens that are the
    likeliest, and ``lost`` the mean over prompts of the log-likelihood a token that compression
    costs, in nats.
    """
    by_cell: dict[Cell, list[Record]] = {}
    for record in records:
        by_cell.setdefault(record.cell, []).append(record)
    out = []
    for cell in grid.all_cells():
        mine = sorted(by_cell.get(cell, []), key=lambda record: record.sample)
        answered = [record for record in mine if record.failed is None]
        if answered:
            off = by_cell.get(cell._replace(policy=OFF, rate=1), []) if cell.policy != OFF else []
            whole = {record.sample: record for record in off}
            out.append(_cell(cell, answered, whole, grid.tasks, len(mine) - len(answered)))
    return out


def _cell(
    cell: Cell,
    answered: list[Record],
    whole: dict[int, Record],
    tasks: tuple[str, ...],
    failed: int,
) -> dict[str, Any]:
    """`whole` are the same prompts' uncompressed answers; empty for those themselves."""
    before, after = _mean(answered, "before"), _mean(answered, "after")
    by_task = {task: [r for r in answered if r.task == task] for task in tasks}
    return {
        **cell._asdict(),
        **_scores(answered, whole),
        "failed": failed,
        "skipped": sum(record.skipped is not None for record in answered),
        "prompt_tokens": _mean(answered, "prompt_tokens"),
        "question_tokens": _mean(answered, "question_tokens"),
        "bytes_before": before,
        "bytes_after": after,
        "kept": round(after / before, 5) if before and after is not None else None,
        "tasks": {task: _scores(mine, whole) for task, mine in by_task.items() if mine},
    }


def _scores(answered: list[Record], whole: dict[int, Record]) -> dict[str, Any]:
    """Everything that is a mean over prompts, of the same prompts uncompressed where it needs."""
    out = _score([r.score for r in answered if r.score is not None])
    right = [r.score for r in answered if r.sample in whole and whole[r.sample].score == 1]
    if kept := [score for score in right if score is not None]:
        out["of_right"] = _score(kept)
    if shares := [r.tokens_right for r in answered if r.tokens_right is not None]:
        out["tokens_right"] = _score(shares)
    losses = [
        off.log_likelihood - r.log_likelihood
        for r in answered
        if (off := whole.get(r.sample)) is not None
        and off.log_likelihood is not None
        and r.log_likelihood is not None
    ]
    if losses:
        mean, half = _normal(losses)
        bounds = [round(mean - half, 5), round(mean + half, 5)] if len(losses) > 1 else None
        out["lost"] = {"n": len(losses), "mean": round(mean, 5), "interval": bounds}
    return out


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
