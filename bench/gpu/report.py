"""The records of a folder as one page of Markdown and two pictures."""

from __future__ import annotations

import json
from pathlib import Path

PARTS = ("kernels", "bandwidth", "serving", "overhead")


def write(folder: Path) -> Path:
    """Write ``report.md`` and the plots from the ``<part>.json`` that lie in `folder`."""
    parts = {
        part: json.loads((folder / f"{part}.json").read_text())
        for part in PARTS
        if (folder / f"{part}.json").exists()
    }
    tables = {
        "kernels": kernels,
        "bandwidth": bandwidth,
        "serving": serving,
        "overhead": overhead,
    }
    lines = ["# On a GPU", ""]
    for part, found in parts.items():
        run = found["runs"][-1]
        gpu = run["gpu"]["name"] if run["gpu"] else "no GPU (smoke)"
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        lines += [f"## {part.capitalize()}", "", f"{gpu}; {versions}; commit {run['commit']}.", ""]
        lines += [*tables[part](found["records"]), "", *problems(found["records"])]
    if plot_bandwidth(parts.get("bandwidth"), folder / "bandwidth.png"):
        lines += ["![bandwidth](bandwidth.png)", ""]
    if plot_serving(parts.get("serving"), folder / "serving.png"):
        lines += ["![serving](serving.png)", ""]
    path = folder / "report.md"
    path.write_text("\n".join(lines))
    return path


def latest(records: list[dict], name: str, *keys: str) -> list[dict]:
    """Records of that name that were measured; of those alike in `keys` the last."""
    found = {}
    for record in records:
        if record["name"] == name and record["status"] in ("ok", "failed"):
            found[tuple(record.get(key) for key in keys)] = record
    return list(found.values())


def table(head: list[str], rows: list[list]) -> list[str]:
    """A Markdown table; None is an empty cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in [head, *cells]]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def problems(records: list[dict]) -> list[str]:
    """What was skipped and what went wrong, with the first line of why."""
    lines = []
    for record in records:
        if record["status"] in ("skipped", "error"):
            why = str(record.get("reason") or record.get("error"))
            why = why.strip().splitlines()[0][:300] if why.strip() else ""
            shape = {
                key: record[key]
                for key in ("dtype", "rows", "length", "skewed", "pool", "input", "rate", "ours")
                if key in record
            }
            lines.append(f"* {record['name']} {json.dumps(shape)}: {record['status']}, {why}")
    return [*lines, ""] if lines else []


def kernels(records: list[dict]) -> list[str]:
    """Largest error by operation and dtype; a failed one in bold."""
    dtypes, rows = ("float32", "float16", "bfloat16"), {}
    for name in dict.fromkeys(record["name"] for record in records):
        for record in latest(records, name, "dtype"):
            errors = [e for e in record.get("max_abs_error", {}).values() if e is not None]
            text = f"{max(errors, default=0):.1e}"
            failed = record["status"] == "failed"
            rows.setdefault(name, {})[record["dtype"]] = f"**{text} failed**" if failed else text
    return table(
        ["largest error", *dtypes], [[name, *map(row.get, dtypes)] for name, row in rows.items()]
    )


def bandwidth(records: list[dict]) -> list[str]:
    """GB/s by shape, and the milliseconds of a compression."""
    copies = latest(records, "copy")
    lines = [f"Device copy: {copies[-1]['gb_per_s']:.0f} GB/s.", ""] if copies else []
    for r in latest(records, "schedule", "requests"):
        lines += [f"Schedule of a step of {r['requests']} requests: {1e3 * r['ms']:.0f} µs.", ""]
    dense = {(r["rows"], r["length"]): r for r in latest(records, "flashinfer", "rows", "length")}
    ours = {
        (r["rows"], r["length"], r["skewed"]): r
        for r in latest(records, "decode", "rows", "length", "skewed")
    }
    rows = []
    for count, length in dict.fromkeys(key[:2] for key in ours):
        each = [ours.get((count, length, skewed)) for skewed in (False, True)]
        speeds = [r and f"{r['gb_per_s']:.0f}" for r in (*each, dense.get((count, length)))]
        times = [r and f"{1e3 * r['ms']:.1f}" for r in (*each, dense.get((count, length)))]
        rows.append([count, length, *speeds, *times])
    head = ["rows", "KVs a row", "equal, GB/s", "skewed, GB/s", "FlashInfer, GB/s"]
    lines += table([*head, "equal, µs", "skewed, µs", "FlashInfer, µs"], rows)
    steps = []
    for name in ("score", "select", "compact"):
        for r in latest(records, name, "rate"):
            steps.append([name, r["tokens"], r["layers"], r["rate"], f"{r['ms']:.2f}"])
    return [*lines, "", *table(["step", "tokens", "layers", "rate", "ms"], steps)]


def serving(records: list[dict]) -> list[str]:
    """One line a round, its ratio to plain SGLang of the same pool and input."""
    rounds = latest(records, "round", "pool", "input", "rate")
    plain = {(r["pool"], r["input"]): r["tokens_per_s"] for r in rounds if r["rate"] is None}
    rows = []
    for r in sorted(rounds, key=lambda r: (-r["pool"], r["input"], r["rate"] or 0)):
        base = plain.get((r["pool"], r["input"]))
        rows.append([
            r["pool"] or "all memory", r["input"], line(r["rate"]), f"{r['tokens_per_s']:.0f}",
            f"{r['tokens_per_s'] / base:.2f}" if base else None,
            r["largest_batch"], f"{r['ttft_ms']:.0f}", f"{r['itl_ms']:.1f}", f"{r['gap_ms']:.1f}",
        ])  # fmt: skip
    head = ["pool", "input", "", "output tokens/s", "ratio", "largest batch"]
    return table([*head, "TTFT, ms", "ITL, ms", "median gap, ms"], rows)


def overhead(records: list[dict]) -> list[str]:
    """Ratios of rate 1 to plain SGLang, and latencies with long prompts."""
    lines = []
    for r in latest(records, "ratio", "input"):
        rows = [
            [key, f"{r[key]['median']:.2f}", "{:.2f}-{:.2f}".format(*r[key]["range"])]
            for key in ("tokens_per_s", "itl_ms", "ttft_ms")
        ]
        lines += [f"Rate 1 over plain SGLang, prompts of {r['input']}, {r['rounds']} rounds:", ""]
        lines += [*table(["", "ratio", "range"], rows), ""]
    for r in latest(records, "compression", "input"):
        lines += [
            f"Compressing a prompt of {r['input']} to rate {r['rate']} adds {r['added_ms']:.1f} ms "
            f"to {r['rate_1_ms']:.1f} ms: {r['share']:.1%}.", "",
        ]  # fmt: skip
    long = [
        [r["input"], line(r["rate"]), r["requests"], r["largest_batch"], f"{r['itl_ms']:.1f}",
         r["gap_full_batch_ms"] and f"{r['gap_full_batch_ms']:.1f}"]
        for r in latest(records, "long context", "input", "rate")
    ]  # fmt: skip
    head = ["input", "", "requests", "largest batch", "ITL, ms", "ITL of the full batch, ms"]
    return lines + table(head, long)


def line(rate: float | None) -> str:
    """The name of a line of a table or plot."""
    return "plain SGLang" if rate is None else f"rate {rate:g}"


def plot_bandwidth(found: dict | None, path: Path) -> bool:
    """GB/s by length, one line for each number of rows; whether there was anything to plot."""
    records = latest(found["records"], "decode", "rows", "length", "skewed") if found else []
    if not records:
        return False
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, skewed in zip(axes, (False, True), strict=True):
        for rows in sorted({r["rows"] for r in records}):
            mine = [r for r in records if r["rows"] == rows and r["skewed"] == skewed]
            mine.sort(key=lambda r: r["length"])
            xs, ys = [r["length"] for r in mine], [r["gb_per_s"] for r in mine]
            axis.plot(xs, ys, marker="o", label=f"{rows} rows")
        for copy in latest(found["records"], "copy"):
            axis.axhline(copy["gb_per_s"], color="grey", linestyle="--", label="copy")
        axis.set(xscale="log", title="skewed lengths" if skewed else "equal lengths")
        axis.set(xlabel="KVs a row", ylabel="GB/s", ylim=0)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def plot_serving(found: dict | None, path: Path) -> bool:
    """Throughput and batch by rate, throughput by input; one row of plots for each pool."""
    records = latest(found["records"], "round", "pool", "input", "rate") if found else []
    if not records:
        return False
    from matplotlib import pyplot

    pools = sorted({r["pool"] for r in records}, reverse=True)
    figure, axes = pyplot.subplots(
        len(pools), 3, figsize=(15, 4 * len(pools)), squeeze=False, layout="constrained"
    )
    for row, pool in zip(axes, pools, strict=True):
        mine = [r for r in records if r["pool"] == pool]
        for axis, key in ((row[0], "tokens_per_s"), (row[2], "largest_batch")):
            for length in sorted({r["input"] for r in mine}):
                # Plain SGLang stands left of rate 1.
                points = sorted((r["rate"] or 0.5, r[key] or 0) for r in mine
                                if r["input"] == length)  # fmt: skip
                axis.plot(*zip(*points, strict=True), marker="o", label=f"input {length}")
            axis.set(xscale="log", xlabel="rate (0.5: plain SGLang)", ylabel=key, ylim=0)
            axis.legend(fontsize="small")
        for rate in sorted({r["rate"] or 0 for r in mine}):
            points = sorted((r["input"], r["tokens_per_s"]) for r in mine
                            if (r["rate"] or 0) == rate)  # fmt: skip
            row[1].plot(*zip(*points, strict=True), marker="o", label=line(rate or None))
        row[1].set(xlabel="input tokens", ylabel="tokens_per_s", ylim=0)
        row[1].set_title(f"pool of {pool} tokens" if pool else "all memory")
        row[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
