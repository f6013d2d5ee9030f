"""A pool for a few requests and many more at once: compressed when memory is short, or retracted.

    python -m bench.pressure --requests 64 --rounds 3 --out bench/results/pressure.json

Both by turns on one server: tokens per second, retractions, requests that run at once. The
embedded model; compare ratios, not absolute numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from kvc_recall import model_path
from kvc_server.generate import generate_body
from kvc_server.launch import Server, launched, sglang

from bench.machine import describe

PROMPT, ANSWER, VOCABULARY = 1000, 200, 400
_RUNNING = re.compile(r"Decode batch.*#running-req: (\d+)")
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")


def ask(server: Server, name: str, knob: dict[str, Any] | None) -> int:
    """The number of tokens that were answered."""
    ids = Random(name).choices(range(10, VOCABULARY), k=PROMPT)
    body = generate_body(ids, knob, max_new_tokens=ANSWER, ignore_eos=True)
    with server.client(timeout=1200) as client:
        answer = client.post("/generate", json=body).raise_for_status().json()
    return len(answer["output_ids"])


def run(server: Server, name: str, requests: int, knob: dict[str, Any] | None) -> dict[str, Any]:
    before, begin = len(server.log.read_text()), time.perf_counter()
    with ThreadPoolExecutor(requests) as pool:
        answered = list(pool.map(lambda i: ask(server, f"{name} {i}", knob), range(requests)))
    seconds, log = time.perf_counter() - begin, server.log.read_text()[before:]
    running = [int(found) for found in _RUNNING.findall(log)]
    with server.client() as client:
        client.post("/flush_cache", params={"timeout": 10}).raise_for_status()
    return {
        "seconds": round(seconds, 2),
        "tokens_per_second": round(sum(answered) / seconds, 1),
        "retracted": sum(map(int, _RETRACTED.findall(log))),
        "running": max(running, default=0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--fit", type=int, default=6, help="requests that fit uncompressed")
    parser.add_argument("--rate", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    pool = -(-args.fit * (PROMPT + ANSWER) // 16) * 16
    program = sglang(
        model_path(), "--attention-backend", "kvc", "--max-total-tokens", str(pool),
        "--decode-log-interval", "1", "--schedule-conservativeness", "0.3",
    )  # fmt: skip
    knobs = {"off": None, "on_pressure": {"on_pressure": args.rate}}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in knobs}
    with launched(program) as server:
        run(server, "warm", 4, knobs["on_pressure"])
        for number in range(args.rounds):
            for name, knob in knobs.items():
                rounds[name].append(run(server, f"{number}", args.requests, knob))
                print(name, json.dumps(rounds[name][-1]), flush=True)
    ratios = [
        on["tokens_per_second"] / off["tokens_per_second"]
        for off, on in zip(rounds["off"], rounds["on_pressure"], strict=True)
    ]
    report = {
        "command": f"python -m bench.pressure --requests {args.requests} --fit {args.fit} "
        f"--rate {args.rate:g} --rounds {args.rounds}",
        "machine": describe(),
        "pool_tokens": pool,
        "rounds": rounds,
        "throughput over off": {
            "median": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        },
    }
    print(json.dumps(report["throughput over off"]))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
