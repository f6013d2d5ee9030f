"""Prompts that are compressed while they come in, against compressing them at their end.

    python -m bench.bounded --length 2048 --n 40 --out bench/results/bounded.json

The same prompts for every `prefill_block` (0 is at the end): how many answers are right, and the
most blocks that a prompt held. The embedded model; the question is read after compression, or with
``--inside`` compressed with the document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from kvc_recall import model_path
from kvc_recall.tasks import sample, words
from kvc_recall.vocabulary import ANSWER
from kvc_server.generate import generate_body
from kvc_server.launch import Server, launched, sglang

from bench.answers import interval
from bench.machine import describe

TASKS = ("needles32", "questions8", "copy32")


def ask(
    server: Server, task: str, length: int, seed: int, knob: dict[str, Any] | None, inside: bool
) -> dict[str, Any]:
    """Whether the answer is right, the most blocks that the prompt held, and seconds."""
    prompt = sample(task, length, Random(f"bounded {task} {seed}"))
    if knob is not None and not inside:
        question = prompt.text.rsplit(" . ", 1)[1]
        knob = knob | {"question_tokens": words(question) + 1}
    body = generate_body(
        f"{prompt.text} {ANSWER}", knob, max_new_tokens=words(prompt.answer) + 2
    )
    begin = time.perf_counter()
    with server.client(timeout=600) as client:
        answer = client.post("/generate", json=body).raise_for_status().json()
    report = answer["kv_compression"]
    assert report["skipped"] is None, report["skipped"]
    held = report.get("prefill", {}).get("blocks_peak", report["blocks"]["before"])
    right = answer["text"].strip() == prompt.answer
    return {"right": right, "held": held, "seconds": time.perf_counter() - begin}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--n", type=int, default=40, help="prompts of a task")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--rates", type=float, nargs="+", default=[8])
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 1024, 512, 256, 128])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--policies", nargs="+", default=["virtual-repeat"])
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--pool", type=int, default=16384, help="tokens")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    knobs: list[dict[str, Any] | None] = [None]
    knobs += [
        {"rate": rate, "policy": policy, "force": True, "prefill_block": block}
        for policy in args.policies
        for rate in args.rates
        for block in args.blocks
    ]
    program = sglang(
        model_path(), "--attention-backend", "kvc", "--max-total-tokens", str(args.pool)
    )
    rows = []
    with launched(program) as server, ThreadPoolExecutor(args.at_once) as pool:
        for knob in knobs:
            row: dict[str, Any] = {"knob": knob}
            seeds = range(args.first, args.first + args.n)
            for task in args.tasks:
                found = list(pool.map(
                    lambda i, t=task, k=knob: ask(server, t, args.length, i, k, args.inside), seeds
                ))  # fmt: skip
                right = sum(each["right"] for each in found)
                low, high = interval(right, args.n)
                row[task] = {
                    "right": round(right / args.n, 3),
                    "interval": [round(low, 2), round(high, 2)],
                    "blocks held at most": max(each["held"] for each in found),
                    "seconds": round(statistics.median(each["seconds"] for each in found), 2),
                }
            rows.append(row)
            print(json.dumps(row), flush=True)
    report = {
        "command": f"python -m bench.bounded --length {args.length} --n {args.n} "
        f"--first {args.first} --rates {' '.join(f'{each:g}' for each in args.rates)} "
        f"--blocks {' '.join(map(str, args.blocks))} --tasks {' '.join(args.tasks)} "
        f"--policies {' '.join(args.policies)}{' --inside' if args.inside else ''} "
        f"--pool {args.pool} --at-once {args.at_once}",
        "machine": describe(),
        "results": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
