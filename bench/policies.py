"""What a policy costs: scoring and selection as a share of prefill.

    python -m bench.policies --out bench/results/policies.json --table docs/policies.md

On the queries, keys and values of one prompt of the embedded model. Prefill is the model's
forward in transformers with the same attention in torch. The model is narrow, so its prefill is
cheap and the shares are near the worst.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from kvc_recall import model_path
from kvc_recall.tasks import sample
from transformers import AutoTokenizer

from bench.machine import describe
from bench.offline import MaskedModel
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.spec import PRESETS, Extent, parse


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of `run`, after one that does not count."""
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def measure(args: argparse.Namespace) -> list[dict]:
    """One record per preset: milliseconds of prefill, of scoring and of selection."""
    masked = MaskedModel(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    text = sample("needles32", args.tokens - 2, Random(1)).text
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    seen = masked.layers(tokens)
    scale = masked.config.head_dim**-0.5
    records = []
    with torch.inference_mode():
        for name in args.policies:
            spec = parse({"rate": args.rate, "policy": name})
            extent = Extent.of(spec, len(tokens), masked.page_size)
            scored = []

            def score(spec=spec, extent=extent, scored=scored) -> None:
                scores = PromptScores(
                    spec, extent, tokens, masked.page_size, len(seen), masked.facts
                )
                for layer, (queries, *cached, lse) in enumerate(seen):
                    scores.observe(layer, queries, PromptKVs.of(*cached), scale, lse)
                scored[:] = [scores]

            times = {
                "prefill": seconds(lambda: masked.prefill(tokens), args.repeats),
                "score": seconds(score, args.repeats),
                "select": seconds(lambda scored=scored: scored[0].select(), args.repeats),
            }
            records.append({
                "policy": name,
                "all_queries": spec.all_queries,
                **{f"{part}_ms": round(1e3 * taken, 2) for part, taken in times.items()},
                "share": round((times["score"] + times["select"]) / times["prefill"], 4),
            })  # fmt: skip
    return records


def markdown(report: dict) -> str:
    """The report as a page."""
    machine, args = report["machine"], report["arguments"]
    lines = [
        "# What a policy costs",
        "",
        f"Scoring and selection of {args['tokens']} tokens at rate {args['rate']:g} beside the "
        f"prefill of the embedded model, in torch on {machine['device']} (one thread, median of "
        f"{args['repeats']}; `python -m bench.policies`, commit {machine['commit']}). The model is "
        "narrow, so its prefill is cheap and the shares are near the worst. Scorers that look at "
        "every query grow with the square of the prompt, as prefill's attention does; what they "
        "saw of a prompt is remembered, and not computed again for another rate.",
        "",
        "| policy | queries | prefill, ms | score, ms | select, ms | share of prefill |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted(report["records"], key=lambda r: r["share"]):
        lines.append(
            f"| {r['policy']} | {'all' if r['all_queries'] else 'last'} | {r['prefill_ms']:.0f} "
            f"| {r['score_ms']:.1f} | {r['select_ms']:.1f} | {r['share']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--policies", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    parser.add_argument("--table", type=Path, help="write the report as Markdown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "command": "python -m bench.policies",
        "arguments": {k: v for k, v in vars(args).items() if k not in ("out", "table", "policies")},
        "machine": describe(),
        "records": measure(args),
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.table:
        args.table.write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
