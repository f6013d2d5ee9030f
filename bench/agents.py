"""Programs that pause between their steps, many more than the pool holds: held, or not.

    python -m bench.agents --agents 20 --fit 5 --rounds 3 --out bench/results/agents.json

Every agent has a context of its own, asks, waits as for a tool, and asks again with what it was
told. Beside them other prompts come that nobody asks again. By turns on one server: with `hold_s`,
and without. The embedded model; compare ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from kvc_recall import model_path
from kvc_server.generate import generate_body
from kvc_server.launch import Server, launched, sglang

from bench.machine import describe

CONTEXT, TOLD, ANSWER, VOCABULARY = 1000, 60, 20, 400


def agent(server: Server, name: str, steps: int, pause: float, knob: dict[str, Any]) -> list[float]:
    """Of every step but the first, which share of what was said before was not prefilled."""
    rng, hits = Random(name), []
    said = rng.choices(range(10, VOCABULARY), k=CONTEXT)
    for step in range(steps):
        body = generate_body(said, knob, max_new_tokens=ANSWER, ignore_eos=True)
        with server.client(timeout=600) as client:
            answer = client.post("/generate", json=body).raise_for_status().json()
        if step:
            before = len(said) - TOLD
            hits.append(min(1.0, answer["meta_info"]["cached_tokens"] / before))
        said = [*said, *answer["output_ids"], *rng.choices(range(10, VOCABULARY), k=TOLD)]
        time.sleep(pause)
    return hits


def noise(server: Server, name: str, over: threading.Event) -> None:
    """Prompts one after the other, each another one."""
    for number in itertools.count():
        if over.is_set():
            return
        ids = Random(f"noise {name} {number}").choices(range(10, VOCABULARY), k=CONTEXT)
        with server.client(timeout=600) as client:
            client.post("/generate", json=generate_body(ids, max_new_tokens=1)).raise_for_status()


def run(server: Server, name: str, args: argparse.Namespace, knob: dict[str, Any]) -> dict:
    begin, over = time.perf_counter(), threading.Event()
    other = threading.Thread(target=noise, args=(server, name, over))
    other.start()
    with ThreadPoolExecutor(args.agents) as pool:
        hits = list(pool.map(
            lambda i: agent(server, f"{name} {i}", args.steps, args.pause, knob),
            range(args.agents),
        ))  # fmt: skip
    seconds = time.perf_counter() - begin
    over.set()
    other.join()
    with server.client() as client:
        client.post("/flush_cache", params={"timeout": 10}).raise_for_status()
    by_step = [round(statistics.mean(step), 3) for step in zip(*hits, strict=True)]
    return {"seconds": round(seconds, 2), "hits_by_step": by_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--fit", type=int, default=5, help="contexts that fit uncompressed")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds")
    parser.add_argument("--rate", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    pool = args.fit * -(-(CONTEXT + (ANSWER + TOLD) * args.steps) // 16) * 16
    program = sglang(model_path(), "--attention-backend", "kvc", "--max-total-tokens", str(pool))
    plain = {"rate": args.rate, "policy": "kv-compress", "reuse": "compressed"}
    knobs = {
        "uncompressed": {"rate": 1},
        "lru": plain,
        "held": plain | {"hold_s": 600},
    }
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in knobs}
    with launched(program) as server:
        for number in range(args.rounds):
            for name, knob in knobs.items():
                rounds[name].append(run(server, f"{number} {name}", args, knob))
                print(name, json.dumps(rounds[name][-1]), flush=True)
    report = {
        "command": f"python -m bench.agents --agents {args.agents} --fit {args.fit} "
        f"--steps {args.steps} --pause {args.pause:g} --rate {args.rate:g} "
        f"--rounds {args.rounds}",
        "machine": describe(),
        "pool_tokens": pool,
        "rounds": rounds,
        "time of held over lru": round(statistics.median(
            held["seconds"] / lru["seconds"]
            for held, lru in zip(rounds["held"], rounds["lru"], strict=True)
        ), 3),
    }  # fmt: skip
    print(report["time of held over lru"])
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
