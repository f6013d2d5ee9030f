"""Chats about one document: what a turn begins with, what it holds, if its answer is right.

    python -m bench.chats --chats 8 --turns 10 --out bench/results/chats.json

Every turn asks for another fact of a document of 2,000 tokens, and goes on with the model's own
answers. Chats run side by side, with the memory of so many uncompressed ones or of less
(``--pool``). The embedded model.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from kvc_recall import model_path
from kvc_recall.tasks import FRAME, Turn, compose, needles, words
from kvc_recall.vocabulary import ANSWER, EOS
from kvc_server.generate import generate_body
from kvc_server.launch import Server, launched, sglang

from bench.machine import describe

DOCUMENT = 2000
REUSES = ("off", "full", "compressed", "both")


def chat(seed: int, turns: int, tokens: int = DOCUMENT) -> tuple[str, list[Turn]]:
    """A document, and questions about its facts."""
    rng = Random(f"chat {seed}")
    facts = needles(tokens, rng, needles=max(16, turns), questions=turns)
    rng.shuffle(facts.lines)
    return compose(facts, tokens - FRAME - words(facts.turns[0].question), rng), facts.turns


def run(
    server: Server, seed: int, turns: int, knob: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Every turn's report, how many tokens it began with, and whether its answer is right."""
    text, asked = chat(seed, turns)
    found = []
    for turn in asked:
        text = f"{text} {turn.question} {ANSWER}"
        body = generate_body(text, knob, max_new_tokens=words(turn.answer) + 2)
        with server.client(timeout=600) as client:
            answer = client.post("/generate", json=body).raise_for_status().json()
        said, told = answer["text"].strip(), answer["meta_info"]
        report = answer["kv_compression"]
        found.append({
            "right": said == turn.answer,
            "prompt": told["prompt_tokens"],
            "cached": told["cached_tokens"],
            "held": report["bytes"]["after"] / report["bytes"]["before"],
            "begun_with": report.get("begun_with"),
            "skipped": report["skipped"],
        })  # fmt: skip
        text = f"{text} {said} {EOS}"
    return found


def by_turn(chats: list[list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Means over chats, turn by turn."""
    turns = list(zip(*chats, strict=True))
    return {
        "right": [round(statistics.mean(each["right"] for each in turn), 3) for turn in turns],
        "cached": [round(statistics.mean(each["cached"] for each in turn)) for turn in turns],
        "prompt": [round(statistics.mean(each["prompt"] for each in turn)) for turn in turns],
        "held": [round(statistics.mean(each["held"] for each in turn), 3) for turn in turns],
        "begun": [sum(each["begun_with"] is not None for each in turn) for turn in turns],
        "skipped": [sum(each["skipped"] is not None for each in turn) for turn in turns],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--rate", type=float, default=8)
    parser.add_argument("--policies", nargs="+", default=["kv-compress"])
    parser.add_argument("--reuse", nargs="+", choices=REUSES, default=list(REUSES))
    parser.add_argument("--pool", type=int, default=32768, help="tokens")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    program = sglang(
        model_path(), "--attention-backend", "kvc", "--max-total-tokens", str(args.pool)
    )
    results: dict[str, Any] = {}
    for policy in args.policies:
        for reuse in args.reuse:
            if reuse == "off" and "off" in results:
                continue
            knob = None
            if reuse != "off":
                knob = {"rate": args.rate, "policy": policy, "reuse": reuse}
            with launched(program) as server, ThreadPoolExecutor(args.at_once) as pool:
                each = pool.map(lambda i, k=knob, s=server: run(s, i, args.turns, k),
                                range(args.chats))  # fmt: skip
                name = "off" if reuse == "off" else f"{policy} {reuse}"
                results[name] = by_turn(list(each))
            print(name, json.dumps(results[name]), flush=True)
    report = {
        "command": f"python -m bench.chats --chats {args.chats} --turns {args.turns} "
        f"--at-once {args.at_once} --rate {args.rate:g} --pool {args.pool} "
        f"--policies {' '.join(args.policies)}",
        "machine": describe(),
        "results": results,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
