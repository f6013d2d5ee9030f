"""The records of a folder as one page of Markdown and two pictures."""

from __future__ import annotations

import json
from pathlib import Path

PARTS = ("kernels", "bandwidth", "serving", "overhead")
#: What says which record it is.
_SHAPE = (
    "dtype", "backend", "requests", "kvs", "bits", "sigma", "prompts", "tokens",
    "pool", "input", "rate", "ours",
)  # fmt: skip


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
                for key in _SHAPE
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
    """Shares of the copy's bandwidth, times of steps, and what a compression is made of."""
    copies = latest(records, "copy")
    copy = copies[-1]["gb_per_s"] if copies else None
    lines = [f"Device copy: {copy:.0f} GB/s.", ""] if copy else []
    for r in latest(records, "schedule", "requests"):
        lines += [f"Schedule of a step of {r['requests']} requests: {1e3 * r['ms']:.0f} µs.", ""]
    steps = {
        (r["requests"], r["kvs"], line_of(r)): r
        for r in latest(
            records, "decode step", "requests", "kvs", "backend", "bits", "sigma"
        )
    }
    columns = list(dict.fromkeys(key[2] for key in steps))
    for title, tell in (
        ("Share of the copy's bandwidth", lambda r: share(r["gb_per_s"], copy)),
        ("Milliseconds of attention in a step of all layers", lambda r: f"{r['ms']:.2f}"),
    ):
        rows = []
        for count, kvs in dict.fromkeys(key[:2] for key in steps):
            each = [steps.get((count, kvs, column)) for column in columns]
            rows.append([count, kvs, *(r and tell(r) for r in each)])
        head = ["requests", "KVs a head in 16 bits", *columns]
        lines += [f"{title}, in a row at equal bytes:", "", *table(head, rows), ""]
    return [*lines, *compression(latest(records, "compression", "prompts", "tokens", "rate"), copy)]


def line_of(record: dict) -> str:
    """Which of the kernels, pools and lengths of heads a decode step was measured with."""
    bits = "" if record["bits"] == 16 else f", {record['bits']} bits"
    if record["backend"] != "triton":
        return f"{record['backend']}, dense{bits}"
    return f"ours, sigma {record['sigma']:g}{bits}"


def share(speed: float, copy: float | None) -> str:
    """Of the bandwidth of a copy; GB/s where that was not measured."""
    return f"{speed / copy:.0%}" if copy else f"{speed:.0f} GB/s"


def compression(records: list[dict], copy: float | None) -> list[str]:
    """What the prompts of a batch take on the device, and its shares; and the host's part."""
    steps, rows = ("score", "select", "compact"), []
    for r in records:
        shares = [f"{r[step]['ms']:.2f} ({r[step]['ms'] / r['ms']:.0%})" for step in steps]
        host = sum(r[step]["host_ms"] for step in steps)
        speeds = [share(r[step]["gb_per_s"], copy) for step in ("score", "compact")]
        rows.append([r["prompts"], r["tokens"], r["rate"], f"{r['ms']:.2f}", *shares, *speeds,
                     f"{host:.2f}"])  # fmt: skip
    head = ["prompts", "tokens", "rate", "ms", *(f"{step}, ms (share)" for step in steps)]
    return table([*head, "scores, of the copy", "compact, of the copy", "host, ms"], rows)


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
    """GB/s of decode steps by requests; whether there was anything to plot."""
    keys = "requests", "kvs", "backend", "bits", "sigma"
    records = latest(found["records"], "decode step", *keys) if found else []
    if not records:
        return False
    from matplotlib import pyplot

    lengths = sorted({r["kvs"] for r in records})
    figure, axes = pyplot.subplots(
        1, len(lengths), figsize=(6 * len(lengths), 4), squeeze=False, layout="constrained"
    )
    for axis, kvs in zip(axes[0], lengths, strict=True):
        mine = sorted((r for r in records if r["kvs"] == kvs), key=lambda r: r["requests"])
        for name in dict.fromkeys(map(line_of, mine)):
            points = [(r["requests"], r["gb_per_s"]) for r in mine if line_of(r) == name]
            style = "-" if name.startswith("ours") else ":"
            axis.plot(*zip(*points, strict=True), style, marker="o", label=name)
        for copy in latest(found["records"], "copy"):
            axis.axhline(copy["gb_per_s"], color="grey", linestyle="--", label="copy")
        axis.set(xscale="log", title=f"{kvs} KVs a head in 16 bits, or their bytes")
        axis.set(xlabel="requests", ylabel="GB/s", ylim=0)
    axes[0][0].legend(fontsize="small")
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
