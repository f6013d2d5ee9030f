"""Many questions on one document: what the first one costs, and what the others do.

    python -m bench.document_reuse --requests 64 --out bench/results/document_reuse.json

One after the other: the time to the first token of the first request, of the next ones, and of one
that comes when the uncompressed document is no longer in the pool. Then all at once on an empty
cache: how many tokens were prefilled. The embedded model, or another; compare ratios, not absolute
numbers.
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
from kvc_server.generate import generate_body
from kvc_server.launch import Server, launched, sglang

from bench.machine import describe

DOCUMENT, QUESTION, BLOCK, VOCABULARY = 2000, 20, 16, 400
POOL = 16384


def tokens(seed: str, length: int) -> list[int]:
    return Random(seed).choices(range(10, VOCABULARY), k=length)


def ask(server: Server, document: list[int], question: list[int], rate: float) -> dict[str, Any]:
    """Milliseconds to the first token, tokens that were not prefilled, and the report."""
    knob = {"rate": rate, "policy": "kv-compress", "question_tokens": len(question)}
    body = generate_body(document + question, knob, max_new_tokens=8) | {"stream": True}
    first, last = 0.0, ""
    with server.client(timeout=600) as client:  # takes tens of milliseconds by itself
        begin = time.perf_counter()
        with client.stream("POST", "/generate", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - begin
                    last = line
    told = json.loads(last.removeprefix("data: "))
    cached = told["meta_info"]["cached_tokens"]
    return {"ttft_ms": 1e3 * first, "cached": cached, "report": told["kv_compression"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8)
    parser.add_argument("--model", type=Path, default=model_path(), help="a folder")
    parser.add_argument("--out", type=Path, help="write the report as JSON")
    args = parser.parse_args()
    document = tokens("document", DOCUMENT)
    questions = [tokens(f"question {i}", QUESTION) for i in range(args.requests)]
    program = sglang(args.model, "--attention-backend", "kvc", "--max-total-tokens", str(POOL))
    with launched(program) as server:
        ask(server, tokens("warm", DOCUMENT), questions[0], args.rate)
        alone = [ask(server, document, question, args.rate) for question in questions[:8]]
        for i in range(POOL // DOCUMENT):  # the document is the least recently used, then
            body = generate_body(tokens(f"other {i}", DOCUMENT - 64), max_new_tokens=1)
            with server.client(timeout=600) as client:
                client.post("/generate", json=body).raise_for_status()
            ask(server, document, questions[8], args.rate)  # its segment is not
        evicted = ask(server, document, questions[9], args.rate)
        with server.client() as client:
            client.post("/flush_cache", params={"timeout": 10}).raise_for_status()
        with ThreadPoolExecutor(args.requests) as pool:
            together = list(pool.map(lambda q: ask(server, document, q, args.rate), questions))
    prefilled = sum(DOCUMENT + QUESTION - each["cached"] for each in together)
    rest = statistics.median(each["ttft_ms"] for each in alone[1:])
    report = {
        "command": "python -m bench.document_reuse "
        f"--requests {args.requests} --rate {args.rate:g}",
        "model": "embedded" if args.model == model_path() else args.model.name,
        "machine": describe(),
        "ttft of the first, ms": round(alone[0]["ttft_ms"], 1),
        "ttft of the next over the first": round(rest / alone[0]["ttft_ms"], 3),
        "ttft after eviction over the first": round(evicted["ttft_ms"] / alone[0]["ttft_ms"], 3),
        "cached after eviction": evicted["cached"],
        "tokens prefilled together": prefilled,
        "of": args.requests * (DOCUMENT + QUESTION),
        "not compressed": sum(each["report"]["skipped"] is not None for each in together),
    }
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
