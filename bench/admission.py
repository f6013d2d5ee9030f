"""Admission by memory at the gateway: what it gains or costs on a small pool.

    python -m bench.admission --rounds 5 --out bench/results/admission.json

One worker with the embedded model and a pool of 4,096 tokens, two gateways before it: one sends
requests on at once, one has `--admit-by-memory`. A burst of requests, each of 800 tokens, goes to
one after the other; the arms alternate round by round, so compare the ratios. Told are the seconds
until the last answer, the median milliseconds to the first token, and how many requests SGLang took
out of its batch again (its log's "retracted").
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
from kvc_recall import model_path
from kvc_recall.tasks import sample
from kvc_server.launch import Server, gateway, launched, sglang
from kvc_server.supervisor import WORKER_ARGS

from bench.machine import describe

POOL, PROMPT = 4096, 800
#: By name: the knob, the longest answer a request allows, and whether it is as long as that.
LOADS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "rate 1": ({"rate": 1}, 400, True),
    "rate 8": ({"rate": 8}, 400, True),
    "rate 1, ends early": ({"rate": 1}, 400, False),
    "rate 8, ends early": ({"rate": 8}, 400, False),
    "rate 1, elastic 16": ({"rate": 1, "elastic": {"max_rate": 16}}, 400, True),
}
ARMS = ("off", "on")


async def burst(server: Server, load: str, requests: int, seed: int) -> tuple[float, list[float]]:
    """Seconds until the last of so many answers, and each one's to its first token."""
    knob, longest, exact = LOADS[load]
    random = Random(seed)
    async with server.async_client() as client:

        async def ask() -> float:
            answer = random.randrange(longest // 4, longest + 1) if exact else longest
            body = {
                "text": sample("needles8", PROMPT, random).text,
                "stream": True,
                "kv_compression": knob,
                "sampling_params": {"temperature": 0, "max_new_tokens": answer,
                                    "ignore_eos": exact},
            }  # fmt: skip
            begin = time.perf_counter()
            async with client.stream("POST", "/generate", json=body) as response:
                response.raise_for_status()
                first = None
                async for _ in response.aiter_raw():
                    first = first or time.perf_counter() - begin
            assert first is not None
            return first

        begin = time.perf_counter()
        firsts = await asyncio.gather(*(ask() for _ in range(requests)))
        return time.perf_counter() - begin, firsts


def measure(server: Server, worker: Server, load: str, requests: int, seed: int) -> dict[str, Any]:
    """One round of one arm."""
    with contextlib.suppress(httpx.HTTPError), worker.client() as client:
        client.post("/flush_cache", params={"timeout": 10})
    logged = len(worker.log.read_text())
    seconds, firsts = asyncio.run(burst(server, load, requests, seed))
    said = worker.log.read_text()[logged:]
    taken = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", said)))
    return {
        "seconds": round(seconds, 3),
        "ttft_ms": round(1000 * statistics.median(firsts), 1),
        "retractions": taken,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {}
    program = sglang(model_path(), *WORKER_ARGS, "--max-total-tokens", str(POOL))
    with launched(program) as worker:
        before = ("--worker-url", worker.url, "--log-level", "warning")
        waits = ("--admit-by-memory", "--queue-timeout", "600")
        with launched(gateway(*before)) as off, launched(gateway(*before, *waits)) as on:
            servers = dict(zip(ARMS, (off, on), strict=True))
            measure(off, worker, args.loads[0], 4, seed=0)  # what is compiled or imported first
            for number in range(args.rounds):
                for load in args.loads:
                    for arm in ARMS if number % 2 else reversed(ARMS):
                        found = measure(servers[arm], worker, load, args.requests, number + 1)
                        rounds.setdefault(load, {}).setdefault(arm, []).append(found)
                        print(load, arm, found, flush=True)
    command = f"python -m bench.admission --rounds {args.rounds} --requests {args.requests}"
    report = {"command": command, "machine": describe(), "rounds": rounds}
    for load, arms in rounds.items():
        for name in ("seconds", "ttft_ms"):
            ratios = [b[name] / a[name] for a, b in zip(arms["off"], arms["on"], strict=True)]
            told = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{load:20} {name:8} on over off {told}")
        taken = {arm: [one["retractions"] for one in each] for arm, each in arms.items()}
        print(f"{load:20} retracted {taken}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
