"""Prompts that begin alike, under SGLang's own load generator: what compression adds or costs.

    python -m bench.shared_prefix --rounds 3 --out bench/results/shared_prefix.json

Four groups of 16 requests, each of 900 tokens that its group shares and 100 of its own, 100 tokens
of output, on a pool of 6,144 tokens and the embedded model (`sglang.bench_serving --dataset-name
generated-shared-prefix`). The knobs alternate round by round on one server, so compare the
ratios, not the absolute numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from kvc_recall import model_path
from kvc_server.launch import Server, launched, sglang
from sglang.benchmark.datasets.common import DatasetRow
from sglang.benchmark.datasets.generated_shared_prefix import (
    sample_generated_shared_prefix_requests,
)
from sglang.benchmark.utils import get_tokenizer

from bench.machine import describe

OUTPUT = 100
SHARED = 900
POOL = 6144
GROUPS, OF_A_GROUP, OWN = 4, 16, 100
#: By name. A prefix is given a block less than is shared: it rounds down to blocks. Apart, the
#: shared part is compressed once for its group, and every question read behind it.
KNOBS: dict[str, dict[str, Any]] = {
    "rate 1": {"rate": 1},
    "rate 2": {"rate": 2},
    "rate 2, prefix": {"rate": 2, "prefix_tokens": SHARED - 16},
    "rate 8": {"rate": 8},
    "rate 8, prefix": {"rate": 8, "prefix_tokens": SHARED - 16},
    "rate 8, apart": {"rate": 8, "policy": "kv-compress", "question_tokens": OWN},
}


@contextlib.contextmanager
def in_home(folder: str) -> Iterator[None]:
    """A home of its own, where SGLang's load generator keeps the requests that it sends."""
    before = os.environ["HOME"]
    os.environ["HOME"] = folder
    try:
        yield
    finally:
        os.environ["HOME"] = before


def load(seed: int, knob: dict[str, Any]) -> list[DatasetRow]:
    """SGLang's own rows of a round, each with `knob` as its part of the request's body.

    SGLang's random tokens are other tokens when their text is read, so a question apart has a
    length of its own: all that is not the longest common beginning of its group.
    """
    random.seed(seed)
    numpy.random.seed(seed)
    tokenizer = get_tokenizer(str(model_path()))
    rows = sample_generated_shared_prefix_requests(
        GROUPS,
        OF_A_GROUP,
        SHARED,
        OWN,
        OUTPUT,
        1.0,
        tokenizer,
        seed,
        fast_prepare=True,
        ordered=True,
    )
    tokens = [tokenizer(row.prompt).input_ids for row in rows]
    for first in range(0, len(rows), OF_A_GROUP):
        group = tokens[first : first + OF_A_GROUP]
        pairs = zip(min(group), max(group), strict=False)  # all others lie between
        shared = next(at for at, (a, b) in enumerate(pairs) if a != b)
        for row, ids in zip(rows[first : first + OF_A_GROUP], group, strict=True):
            apart = {"question_tokens": len(ids) - shared} if "question_tokens" in knob else {}
            sampling = {
                "temperature": 0,
                "max_new_tokens": OUTPUT,
                "ignore_eos": True,
                "custom_params": {"kv_compression": knob | apart},
            }
            row.extra_request_body = {"sampling_params": sampling}
    random.shuffle(rows)
    return rows


def measure(server: Server, knob: dict[str, Any], seed: int) -> dict[str, float]:
    """One round: output tokens per second and milliseconds to the first token."""
    with tempfile.TemporaryDirectory() as home, in_home(home):
        rows = load(seed, knob)
        cached = next(Path(home).rglob("*.pkl"))  # what the load generator takes instead of its own
        cached.write_bytes(pickle.dumps(rows))
        out = Path(home) / "out.jsonl"
        command = [
            sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang",
            "--base-url", server.url, "--dataset-name", "generated-shared-prefix",
            "--gsp-num-groups", str(GROUPS), "--gsp-prompts-per-group", str(OF_A_GROUP),
            "--gsp-system-prompt-len", str(SHARED), "--gsp-question-len", str(OWN),
            "--gsp-output-len", str(OUTPUT), "--gsp-fast-prepare",
            "--model", str(model_path()), "--seed", str(seed), "--flush-cache",
            "--warmup-requests", "0", "--disable-tqdm", "--output-file", str(out),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        found = json.loads(out.read_text().splitlines()[-1])
    assert found["completed"] == 64, f"only {found['completed']} of 64 requests were answered"
    return {"tokens_per_second": found["output_throughput"], "ttft_ms": found["median_ttft_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--knobs", nargs="+", choices=list(KNOBS), default=list(KNOBS))
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in args.knobs}
    program = sglang(model_path(), "--attention-backend", "kvc", "--max-total-tokens", str(POOL))
    with launched(program) as server:
        for number in range(args.rounds):
            for name in args.knobs:
                rounds[name].append(measure(server, KNOBS[name], seed=number + 1))
                print(name, rounds[name][-1], flush=True)
    first = rounds[args.knobs[0]]
    report = {
        "command": f"python -m bench.shared_prefix --rounds {args.rounds}",
        "machine": describe(),
        "rounds": rounds,
        f"time to first token over {args.knobs[0]}": {
            name: [
                round(one["ttft_ms"] / base["ttft_ms"], 3)
                for one, base in zip(each, first, strict=True)
            ]
            for name, each in rounds.items()
        },
        f"throughput over {args.knobs[0]}": {
            name: [
                round(one["tokens_per_second"] / base["tokens_per_second"], 3)
                for one, base in zip(each, first, strict=True)
            ]
            for name, each in rounds.items()
        },
    }
    for name, ratios in report[f"throughput over {args.knobs[0]}"].items():
        ttft = report[f"time to first token over {args.knobs[0]}"][name]
        print(f"{name:16} {statistics.median(ratios):.2f}  {ratios}  {ttft}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
