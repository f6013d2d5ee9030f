"""Accuracy of the embedded model by policy and rate, through the gateway.

    python -m bench.quality --n 200 --out bench/results/quality.json --table docs/quality.md

Every prompt is asked at every policy and rate before the next ones are, so that the prefix
cache pays for the prefill once. Accuracy is exact match of the whole answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
from kvc_recall.tasks import Prompt, sample
from rich.progress import Progress

from bench.machine import describe
from bench.serving import gateway
from sgl_kvc.spec import DEFAULT_POLICY, PRESETS

TASKS = ("single", "needles8", "needles32", "copy32", "votes")
RATES = (2, 4, 8, 16, 32)
CONCURRENT = 32
SEED = 20_000_000  # far from the training's


def prompts(task: str, n: int, tokens: int) -> list[Prompt]:
    """`n` held-out prompts of `tokens` tokens."""
    return [sample(task, tokens, Random(SEED + i)) for i in range(n)]


async def ask(client: httpx.AsyncClient, prompt: Prompt, knob: dict[str, Any]) -> dict:
    """One chat completion: whether it is right, and the compression report."""
    body = {
        "model": "recall",
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": len(prompt.answer.split()) + 2,
        "temperature": 0,
        "kv_compression": knob,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    content = answer.json()
    text = content["choices"][0]["message"]["content"]
    right = text.split() == prompt.answer.split()
    return {"right": right, "report": content["kv_compression"]}


def cells(policies: list[str], rates: list[float]) -> list[tuple[str, dict]]:
    """Name and knob of every column: uncompressed once, then every policy at every rate."""
    grid = [(p, {"rate": r, "policy": p}) for p in policies for r in rates]
    return [("off", {"rate": 1}), *grid]


async def measure(url: str, args: argparse.Namespace) -> list[dict]:
    """One record per task, policy and rate."""
    columns = cells(args.policies, args.rates)
    records = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        with Progress() as progress:
            bar = progress.add_task("", total=len(args.tasks) * args.n * len(columns))
            for task in args.tasks:
                answers: list[list[dict]] = [[] for _ in columns]
                asked = prompts(task, args.n, args.tokens)
                for first in range(0, args.n, CONCURRENT):
                    for column, (_, knob) in zip(answers, columns, strict=True):
                        batch = asked[first : first + CONCURRENT]
                        column += await asyncio.gather(*(ask(client, p, knob) for p in batch))
                        progress.advance(bar, len(batch))
                for column, (policy, knob) in zip(answers, columns, strict=True):
                    records.append(_record(task, policy, knob, column))
    return records


def _record(task: str, policy: str, knob: dict, answers: list[dict]) -> dict:
    n, right = len(answers), sum(answer["right"] for answer in answers)
    low, high = wilson(right, n)
    after = [answer["report"]["bytes"]["after"] for answer in answers]
    return {
        "task": task,
        "policy": policy,
        "rate": knob["rate"],
        "n": n,
        "accuracy": right / n,
        "interval": [round(low, 4), round(high, 4)],
        "bytes_after": sum(after) / n,
        "skipped": sum(answer["report"]["skipped"] is not None for answer in answers),
    }


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927)."""
    p = right / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return centre - half, centre + half


def markdown(report: dict) -> str:
    """The report as a page: one table a task, policies down, rates across."""
    args, records = report["arguments"], report["records"]
    machine = report["machine"]
    lines = [
        "# Accuracy by policy and rate",
        "",
        f"Embedded model, {args['tokens']} tokens, exact match of the whole answer, "
        f"n = {args['n']} a cell, through the gateway. `make quality` made this page in "
        f"{report['seconds'] / 60:.0f} minutes on {machine['device']} "
        f"(SGLang {machine['versions']['sglang']}, commit {machine['commit']}). The 95 % "
        "intervals and the bytes are in "
        "[bench/results/quality.json](../bench/results/quality.json).",
    ]
    for task in args["tasks"]:
        mine = {(r["policy"], r["rate"]): r for r in records if r["task"] == task}
        off = mine["off", 1]["accuracy"]
        lines += ["", f"## {task} (uncompressed {off:.3f})", ""]
        lines += ["| policy | " + " | ".join(f"rate {r:g}" for r in args["rates"]) + " |"]
        lines += ["|---|" + "---|" * len(args["rates"])]
        for policy in args["policies"]:
            row = [f"{mine[policy, rate]['accuracy']:.3f}" for rate in args["rates"]]
            lines.append(f"| {policy} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=200, help="prompts a cell")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--policies", nargs="+", default=[DEFAULT_POLICY, *sorted(
        name for name in PRESETS if name != DEFAULT_POLICY)])  # fmt: skip
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--pool", type=int, default=65536, help="tokens the KV pool holds")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    parser.add_argument("--table", type=Path, help="write the report as Markdown")
    args = parser.parse_args()
    with gateway("--max-total-tokens", str(args.pool)) as url:
        begin = time.perf_counter()
        records = asyncio.run(measure(url, args))
    report = {
        "command": "python -m bench.quality",
        "arguments": {k: v for k, v in vars(args).items() if k not in ("out", "table")},
        "machine": describe(),
        "seconds": round(time.perf_counter() - begin),
        "records": records,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.table:
        args.table.write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
