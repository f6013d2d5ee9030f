"""Everything that needs a GPU, from a source tree on a machine without a network.

    PYTHONPATH=.:kernels:server:models python -m bench.gpu --all --out build/gpu
    python -m bench.gpu --part serving --inputs 2000 --rates 1 8 --out build/gpu

Each part adds its records to ``<out>/<part>.json`` as they are measured, and the report of all
that lies there is written anew to ``<out>/report.md`` with its plots. ``--smoke`` runs tiny sizes
on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("kernels", "bandwidth", "serving", "overhead")
#: Seconds for all checks of one kernel, compilation included.
_CHECK_TIMEOUT_S = 240


def parse() -> argparse.Namespace:
    summary = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=summary)
    parser.add_argument("--out", type=Path, required=True, help="folder of records and report")
    parser.add_argument("--all", action="store_true", help="all parts, one after the other")
    parser.add_argument("--part", action="append", choices=PARTS, default=[])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--only", nargs="+", help="kernels: these checks")
    serving = parser.add_argument_group("serving and overhead")
    serving.add_argument("--inputs", type=int, nargs="+",
                         default=[500, 1000, 2000, 4000, 6000, 8000, 12000])  # fmt: skip
    serving.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    serving.add_argument("--requests", type=int, default=256)
    serving.add_argument("--output-tokens", type=int, default=500)
    serving.add_argument("--pool", type=int, nargs="+", default=[43000, 0],
                         help="tokens of the KV pool; 0 is all memory")  # fmt: skip
    serving.add_argument("--rounds", type=int, default=3, help="overhead: rounds compared")
    serving.add_argument("--prompt", type=int, default=8000,
                         help="overhead: of the prompt whose compression is timed")  # fmt: skip
    serving.add_argument("--context", type=int, default=32000, help="overhead: of the long prompts")
    serving.add_argument("--batch", type=int, default=64, help="overhead: how many long prompts")
    args = parser.parse_args()
    args.part = list(PARTS) if args.all else args.part
    if not args.part:
        parser.error("one of --all and --part is needed")
    return args


def main() -> None:
    args = parse()
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        if not args.smoke:
            sys.exit("bench.gpu: PyTorch sees no GPU; --smoke runs tiny sizes on the CPU")
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when kernels are defined
    for part in args.part:
        if part == "kernels" and on_gpu and not args.only:
            kernels_apart(args)
        else:
            run(part, args)

    from bench.gpu.report import write

    write(args.out)


def run(part: str, args: argparse.Namespace) -> None:
    """One part in this process."""
    from bench.gpu.records import Records

    arguments = {k: v for k, v in vars(args).items() if k != "out"}
    records = Records(args.out, part, arguments)
    if part == "kernels":
        from bench.gpu import kernels

        kernels.run(records, args.only, smoke=args.smoke)
    elif part == "bandwidth":
        from bench.gpu import bandwidth

        bandwidth.run(records, smoke=args.smoke)
    else:
        from bench.gpu import serving

        serving.run(records, part, args)


def kernels_apart(args: argparse.Namespace) -> None:
    """Each kernel's checks in a process of its own: an illegal access takes the device along."""
    from bench.gpu.kernels import CHECKS
    from bench.gpu.records import Records

    for name in CHECKS:
        command = [sys.executable, "-m", "bench.gpu", "--out", str(args.out.resolve())]
        command += ["--part", "kernels", "--only", name, *(["--smoke"] if args.smoke else [])]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=_CHECK_TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            code = f"none after {_CHECK_TIMEOUT_S} s"
        if code:
            records = Records(args.out, "kernels", {"only": name})
            records.add(name, status="error", error=f"the process ended with exit code {code}")


if __name__ == "__main__":
    # Without an installation the source tree is enough.
    for folder in ("models", "server", "kernels", "."):
        sys.path.insert(0, str(ROOT / folder))
    main()
