"""What the wait of idle OpenMP threads costs: layers of SmolLM2-135M's shape, in torch.

    python -m bench.threads --taken 0
    python -m bench.threads --taken 1

prints tokens per second with as many threads as cores, for each way to wait, and with one thread;
each in a process of its own, asked in turn. `--taken` cores are kept busy by other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time

LAYERS, HIDDEN, INNER, QKV, VOCABULARY = 30, 576, 1536, 960, 49152
SETTINGS = {
    "libgomp's default": {},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
BATCHES = (1, 8, 256)


def work() -> None:
    """Answer batch sizes on stdin with tokens per second."""
    import torch
    from torch.nn.functional import linear, rms_norm, silu

    shapes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
    layers = [[torch.randn(shape) * 0.02 for shape in shapes] for _ in range(LAYERS)]
    head = torch.randn(VOCABULARY, HIDDEN) * 0.02

    @torch.inference_mode()
    def forward(batch: int) -> None:
        x = torch.randn(batch, HIDDEN)
        for qkv, out, up, down in layers:
            x = x + linear(linear(rms_norm(x, (HIDDEN,)), qkv)[:, :HIDDEN], out)
            gate, value = linear(rms_norm(x, (HIDDEN,)), up).chunk(2, -1)
            x = x + linear(silu(gate) * value, down)
        linear(x[-8:], head).argmax(-1)

    forward(1)
    for line in sys.stdin:
        start, steps = time.perf_counter(), 0
        while (spent := time.perf_counter() - start) < 0.6:
            forward(int(line))
            steps += 1
        print(int(line) * steps / spent, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--taken", type=int, default=0, help="cores that other processes keep busy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    found: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:

        def start(*command: str, **env: str) -> subprocess.Popen:
            process = subprocess.Popen(
                [sys.executable, *command], env=clean | env, text=True, bufsize=1,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            stack.callback(process.kill)
            return process

        workers = {name: start(__file__, "--work", **env) for name, env in SETTINGS.items()}
        for _ in range(args.taken):
            start("-c", "while True: pass")
        for _ in range(args.rounds):
            for batch in BATCHES:
                for name, worker in workers.items():
                    worker.stdin.write(f"{batch}\n")
                    rate = float(worker.stdout.readline())
                    found.setdefault((name, batch), []).append(rate)
    for name in SETTINGS:
        rates = (statistics.median(found[name, batch]) for batch in BATCHES)
        print(f"{name:24}", *(f"{rate:8.2f}" for rate in rates))
    return None


if __name__ == "__main__":
    main()
