"""Concurrency and throughput at a fixed KV pool, compression off and on in one run.

    python -m bench.throughput --rates 1 8 32 --rounds 3

Rates alternate round by round on one server, so that other work on the machine touches
all of them alike; compare the ratios, not the absolute numbers. ``--plain`` adds SGLang
without the plugin (its own attention, pool and radix cache) as one more line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import re
import statistics
import time
from pathlib import Path

import httpx
from kvc_server.generate import generate_body
from kvc_server.launch import Server, launched, sglang
from rich.console import Console
from rich.table import Table

from bench.machine import describe

PLAIN = "plain SGLang"


@dataclasses.dataclass(frozen=True)
class Load:
    """What one round sends."""

    requests: int
    input_tokens: int
    output_tokens: int
    vocabulary: int


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round measured."""

    tokens_per_second: float
    largest_batch: int
    bytes_after: float | None  # mean over the requests; None when the server does not report


async def measure(server: Server, load: Load, rate: float | None, seed: int) -> Round:
    """Send all requests at once, wait for the last; no prompt shares a prefix with another."""
    seen = len(server.log.read_text())
    async with server.async_client(timeout=1800) as client:
        await client.post("/flush_cache", params={"timeout": 30})
        bodies = [_body(load, rate, seed * load.requests + i) for i in range(load.requests)]
        begin = time.perf_counter()
        answers = await asyncio.gather(*(_ask(client, body) for body in bodies))
        seconds = time.perf_counter() - begin
    produced = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    assert produced == load.requests * load.output_tokens, "a request ended early"
    batches = re.findall(r"#running-req: (\d+)", server.log.read_text()[seen:])
    kept = [answer.get("kv_compression", {}).get("bytes", {}).get("after") for answer in answers]
    return Round(
        produced / seconds,
        max(map(int, batches)),
        None if None in kept else statistics.mean(kept),
    )


async def _ask(client: httpx.AsyncClient, body: dict) -> dict:
    answer = await client.post("/generate", json=body)
    answer.raise_for_status()
    return answer.json()


def _body(load: Load, rate: float | None, seed: int) -> dict:
    ids = [(seed * 7919 + i * i * 31 + 17 * i) % (load.vocabulary - 16) + 16
           for i in range(load.input_tokens)]  # fmt: skip
    knob = None if rate is None else {"rate": rate}
    return generate_body(ids, knob, max_new_tokens=load.output_tokens, ignore_eos=True)


def run(args: argparse.Namespace) -> dict:
    """All rounds; per line, the median throughput and its ratio to the first line's."""
    config = json.loads((Path(args.model) / "config.json").read_text())
    load = Load(args.requests, args.input_tokens, args.output_tokens, config["vocab_size"])
    common = ("--max-total-tokens", str(args.pool), "--decode-log-interval", "1")
    rounds: dict[str, list[Round]] = {f"rate {rate:g}": [] for rate in args.rates}
    with contextlib.ExitStack() as stack:
        ours = sglang(args.model, "--attention-backend", "kvc", *common)
        server = stack.enter_context(launched(ours))
        plain = None
        if args.plain:
            rounds = {PLAIN: []} | rounds
            theirs = ("--attention-backend", "torch_native", "--page-size", "16")
            plain = stack.enter_context(launched(sglang(args.model, *theirs, *common)))
        for number in range(args.rounds + 1):  # the first warms up
            for rate, name in zip(args.rates, (f"rate {r:g}" for r in args.rates), strict=True):
                result = asyncio.run(measure(server, load, rate, number))
                if number:
                    rounds[name].append(result)
            if plain:
                result = asyncio.run(measure(plain, load, None, number))
                if number:
                    rounds[PLAIN].append(result)
    return {
        "command": "python -m bench.throughput",
        "arguments": {k: v for k, v in vars(args).items() if k not in ("model", "out")},
        "model": Path(args.model).name,
        "machine": describe(),
        "lines": {name: _summary(results, rounds) for name, results in rounds.items()},
    }


def _summary(results: list[Round], rounds: dict[str, list[Round]]) -> dict:
    baseline = next(iter(rounds.values()))
    ratios = [
        result.tokens_per_second / base.tokens_per_second
        for result, base in zip(results, baseline, strict=True)
    ]
    return {
        "tokens_per_second": round(statistics.median(r.tokens_per_second for r in results), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        "largest_batch": max(r.largest_batch for r in results),
        "bytes_per_request": results[-1].bytes_after,
    }


def show(report: dict) -> None:
    """Print the report as a table."""
    args = report["arguments"]
    table = Table(
        title=f"{args['requests']} requests of {args['input_tokens']} + {args['output_tokens']} "
        f"tokens, pool of {args['pool']} tokens, median of {args['rounds']} rounds"
    )
    for column in ("", "output tokens/s", "ratio", "of rounds", "largest batch", "KV of a prompt"):
        table.add_column(column, justify="right" if column else "left")
    for name, line in report["lines"].items():
        low, high = line["ratio_range"]
        size = line["bytes_per_request"]
        table.add_row(
            name,
            f"{line['tokens_per_second']:.0f}",
            f"{line['ratio']:.2f}",
            f"{low:.2f}-{high:.2f}",
            str(line["largest_batch"]),
            f"{size / 1024:.0f} KiB" if size else "",
        )
    Console().print(table)


def main() -> None:
    from kvc_recall import model_path

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(model_path()), help="folder of the model")
    parser.add_argument("--pool", type=int, default=6144, help="tokens the KV pool holds")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-tokens", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 8.0, 32.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="measure plain SGLang as well")
    parser.add_argument("--out", type=Path, help="also write the report as JSON")
    args = parser.parse_args()
    report = run(args)
    show(report)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
