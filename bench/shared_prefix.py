"""Prompts that begin alike, under SGLang's own load generator: what compression adds or costs.

    python -m bench.shared_prefix --rounds 3 --out bench/results/shared_prefix.json

Four groups of 16 requests, each of 900 tokens that its group shares and 100 of its own, 100 tokens
of output, on a pool of 6,144 tokens and the embedded model (`sglang.bench_serving --dataset-name
generated-shared-prefix`). The knobs alternate round by round on one server, so compare the
ratios, not the absolute numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvc_recall import model_path
from kvc_server.launch import Server, launched, sglang

from bench.machine import describe

OUTPUT = 100
SHARED = 900
POOL = 6144
#: By name. A prefix is given a block less than is shared, and a question a block more than is not:
#: both sides round down to blocks. Apart, the shared part is compressed once for its group.
KNOBS: dict[str, dict[str, Any]] = {
    "rate 1": {"rate": 1},
    "rate 2": {"rate": 2},
    "rate 2, prefix": {"rate": 2, "prefix_tokens": SHARED - 16},
    "rate 8": {"rate": 8},
    "rate 8, prefix": {"rate": 8, "prefix_tokens": SHARED - 16},
    "rate 8, apart": {"rate": 8, "policy": "kv-compress", "question_tokens": 100 + 16},
}


def measure(server: Server, knob: dict[str, Any], seed: int) -> dict[str, float]:
    """One round: output tokens per second and milliseconds to the first token."""
    sampling = {
        "temperature": 0,
        "max_new_tokens": OUTPUT,
        "ignore_eos": True,
        "custom_params": {"kv_compression": knob},
    }
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
        command = [
            sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang",
            "--base-url", server.url, "--dataset-name", "generated-shared-prefix",
            "--gsp-num-groups", "4", "--gsp-prompts-per-group", "16",
            "--gsp-system-prompt-len", str(SHARED), "--gsp-question-len", "100",
            "--gsp-output-len", str(OUTPUT), "--gsp-fast-prepare",
            "--model", str(model_path()), "--seed", str(seed), "--flush-cache",
            "--warmup-requests", "0", "--disable-tqdm", "--output-file", out.name,
            "--extra-request-body", json.dumps({"sampling_params": sampling}),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        found = json.loads(Path(out.name).read_text().splitlines()[-1])
    assert found["completed"] == 64, f"only {found['completed']} of 64 requests were answered"
    return {"tokens_per_second": found["output_throughput"], "ttft_ms": found["median_ttft_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--knobs", nargs="+", choices=list(KNOBS), default=list(KNOBS))
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in args.knobs}
    program = sglang(
        model_path(), "--attention-backend", "kvc", "--max-total-tokens", str(POOL)
    )
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
        f"throughput over {args.knobs[0]}": {
            name: [
                round(one["tokens_per_second"] / base["tokens_per_second"], 3)
                for one, base in zip(each, first, strict=True)
            ]
            for name, each in rounds.items()
        },
    }
    for name, ratios in report[f"throughput over {args.knobs[0]}"].items():
        print(f"{name:16} {statistics.median(ratios):.2f}  {ratios}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
