"""results.json, report.md and the curves, from the answers of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvc_eval import figure
from kvc_eval.grid import OFF, Grid

RESULTS, REPORT = "results.json", "report.md"

Cells = list[dict[str, Any]]

_QUESTION = {
    "inside": "document and question compressed together",
    "after": "question read after compression, as a later turn's",
    "turns": "compressed together, beginning with what the turn before has left",
}


def write(folder: Path, report: dict[str, Any], grid: Grid) -> None:
    """Write everything to `folder`.

    `report` goes to results.json as it is; its ``cells`` are those of `results.summarise`,
    the rest says how they came about.
    """
    (folder / RESULTS).write_text(_json(report))
    for length, question in _panels(grid):
        cells = _of(report["cells"], length, question)
        if any(cell["kept"] and cell["policy"] != OFF for cell in cells):
            figure.draw(folder / picture(length, question), panel_title(length, question), cells)
    (folder / REPORT).write_text(markdown(report, grid))


def _json(report: dict[str, Any]) -> str:
    """The report with a line for every cell, so that a change of one can be read."""
    head = json.dumps(report | {"cells": []}, indent=1)
    cells = ",\n".join(f"  {json.dumps(cell)}" for cell in report["cells"])
    return head.replace('"cells": []', f'"cells": [\n{cells}\n ]') + "\n"


def picture(length: int, question: str) -> str:
    """File name of the curves of one length and question mode."""
    return f"accuracy-{length or 'whole'}-{question}.png"


def panel_title(length: int, question: str) -> str:
    """Heading of the tables and of the curves."""
    tokens = f"{length:,} tokens" if length else "whole documents"
    return f"{tokens}, {_QUESTION[question]}"


def markdown(report: dict[str, Any], grid: Grid) -> str:
    """The report as a page: for every length and question mode the curves and the tables."""
    lines = ["# Accuracy by policy and rate", "", _preamble(report, grid), ""]
    if report["failed"]:
        lines += [
            f"**{report['failed']} requests failed** and are in no score; run it again to retry.",
            "",
        ]
    if not report["compresses"]:
        lines += [
            "The endpoint did not report `kv_compression`: it does not compress, so only the "
            "uncompressed score could be measured.",
            "",
        ]
    for length, question in _panels(grid):
        cells = _of(report["cells"], length, question)
        if cells:
            lines += _panel(cells, grid, length, question)
    return "\n".join(lines).rstrip() + "\n"


_FORCED = (
    "Right answers are put into the model's mouth: a score is 1 if every token of the answer is "
    "the likeliest, which is when greedy decoding says it. "
)
#: What is shown of compressed cells beside the score, where there is anything: heading and format.
_ALSO = {
    "of_right": ("Score of the prompts that are answered right uncompressed", "score"),
    "tokens_right": ("Share of right answer tokens", "score"),
    "lost": ("Log-likelihood lost against uncompressed, nats a token", "mean"),
}


def _preamble(report: dict[str, Any], grid: Grid) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return (
        f"Model {grid.model}, suite {grid.suite}, {grid.n} prompts a point, spread over "
        f"{', '.join(grid.tasks)}. Scores are from 0 to 1, with their 95 % intervals; percentages "
        "are the bytes a prompt really held in the pool after compression, of those before. "
        f"{_FORCED if grid.forced else ''}"
        f"`{report['command']}` on {report['machine']} ({versions}, commit "
        f"{report['commit'] or 'unknown'}): {report['answers_in_seconds']:,} of "
        f"{report['answers']:,} answers in {report['seconds']:,} s."
    )


def _panel(cells: Cells, grid: Grid, length: int, question: str) -> list[str]:
    lines = [f"## {panel_title(length, question)}", ""]
    off = next((cell for cell in cells if cell["policy"] == OFF), None)
    if off:
        tokens = f", {off['prompt_tokens']:,.0f} tokens on average" if off["prompt_tokens"] else ""
        lines += [f"Uncompressed: {_with_interval(off)}{tokens}.", ""]
    compressed = [cell for cell in cells if cell["policy"] != OFF]
    if compressed:
        if any(cell["kept"] for cell in compressed):
            name = picture(length, question)
            lines += [f"![score against bytes kept]({name})", ""]
        lines += [*_table(grid, compressed, _with_bytes), ""]
        if skipped := sum(cell["skipped"] for cell in compressed):
            lines += [f"{skipped} answers were not compressed (`skipped`); they count too.", ""]
        lines += _also(grid, off, compressed)
    for task in grid.tasks if len(grid.tasks) > 1 else ():
        of_task = [cell for cell in compressed if task in cell["tasks"]]
        score = off["tasks"].get(task) if off else None
        if score:
            lines += [f"### {task} (uncompressed {score['score']:.3f})", ""]
        if of_task:
            lines += [*_table(grid, of_task, lambda cell, t=task: _score(cell["tasks"][t])), ""]
    return lines


def _also(grid: Grid, off: dict[str, Any] | None, cells: Cells) -> list[str]:
    """Tables of the graded metrics, over all tasks together."""
    lines: list[str] = []
    for name, (heading, field) in _ALSO.items():
        mine = [cell for cell in cells if name in cell]
        if not mine or (name == "of_right" and not grid.forced):
            continue
        whole = f" (uncompressed {off[name][field]:.3f})" if off and name in off else ""
        lines += [f"### {heading}{whole}", ""]
        lines += [*_table(grid, mine, lambda cell, n=name, f=field: _with_interval(cell[n], f)), ""]
    return lines


def _table(grid: Grid, cells: Cells, show: Any) -> list[str]:
    """Policies down, rates across."""
    at = {(cell["policy"], cell["rate"]): cell for cell in cells}
    lines = ["| policy | " + " | ".join(f"rate {rate:g}" for rate in grid.rates) + " |"]
    lines += ["|---|" + "---|" * len(grid.rates)]
    for policy in grid.policies:
        row = [at.get((policy, rate)) for rate in grid.rates]
        shown = [show(cell) if cell else "" for cell in row]
        lines.append(f"| {policy} | " + " | ".join(shown) + " |")
    return lines


def _score(of: dict[str, Any]) -> str:
    return f"{of['score']:.3f}"


def _with_interval(of: dict[str, Any], field: str = "score") -> str:
    if of["interval"] is None:
        return f"{of[field]:.3f}"
    low, high = of["interval"]
    return f"{of[field]:.3f} ({low:.3f} to {high:.3f})"


def _with_bytes(cell: dict[str, Any]) -> str:
    kept = "" if cell["kept"] is None else f" at {100 * cell['kept']:.3g} %"
    return _with_interval(cell) + kept


def _panels(grid: Grid) -> list[tuple[int, str]]:
    return [(length, question) for length in grid.lengths for question in grid.questions]


def _of(cells: Cells, length: int, question: str) -> Cells:
    return [cell for cell in cells if (cell["length"], cell["question"]) == (length, question)]
