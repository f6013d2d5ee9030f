"""Curves: the score against the bytes that were really kept, one line a policy."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from kvc_eval.grid import OFF

_STYLES = ("-", "--", "-.", ":")
_MARKERS = "osD^v<>PX*hp"


def draw(path: Path, title: str, cells: list[dict[str, Any]]) -> None:
    """Write a PNG of the cells of one length and question mode (see `results.summarise`).

    The x axis is bytes after / bytes before, logarithmic; upright lines are the 95 %
    intervals. The legend stands in the order of the mean score, best first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    lines = _lines(cells)
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.add_subplot()
    for cell in (cell for cell in cells if cell["policy"] == OFF):
        axes.axhline(cell["score"], color="black", linewidth=1, zorder=0, label="uncompressed")
        axes.axhspan(*cell["interval"], color="black", alpha=0.08, linewidth=0, zorder=0)
    styles = dict(zip(sorted(lines), _line_styles(), strict=False))
    for policy in sorted(lines, key=lambda name: -_mean(lines[name])):
        points = lines[policy]
        kept = [cell["kept"] for cell in points]
        axes.plot(
            kept, [cell["score"] for cell in points], label=policy, markersize=5, linewidth=1.5,
            **styles[policy],
        )  # fmt: skip
        low, high = zip(*(cell["interval"] for cell in points), strict=True)
        axes.vlines(kept, low, high, colors=styles[policy]["color"], alpha=0.4, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.2g} %"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("bytes kept of the prompt's KVs")
    axes.set_ylabel("score")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, handlelength=4)
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def _lines(cells: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The compressed cells of every policy, fewest bytes first."""
    compressed = sorted((c for c in cells if c["policy"] != OFF), key=lambda c: c["kept"])
    lines: dict[str, list[dict[str, Any]]] = {}
    for cell in compressed:
        lines.setdefault(cell["policy"], []).append(cell)
    return lines


def _mean(points: list[dict[str, Any]]) -> float:
    return sum(cell["score"] for cell in points) / len(points)


def _line_styles() -> itertools.chain[dict[str, Any]]:
    """Ten colours by four dashes, and markers that go round at another pace: 40 differ."""
    styles = (
        {"color": f"C{i % 10}", "linestyle": _STYLES[i // 10 % 4], "marker": _MARKERS[i % 12]}
        for i in range(40)
    )
    return itertools.chain(styles, itertools.repeat({"color": "gray"}))
