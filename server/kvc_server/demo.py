"""`sgl-kvc demo`: the same question at several rates, through the gateway, in one table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

from kvc_server.embedded import RECALL, embedded_model
from kvc_server.launch import LaunchFailed, gateway, launched
from kvc_server.settings import SettingsError

RATES = (1, 4, 8, 16, 32)
_TIMED_TOKENS = 64


class DemoFailed(Exception):
    """The server answered an error."""


@dataclasses.dataclass
class Answer:
    """What came back for one rate; times in seconds."""

    text: str
    report: dict[str, Any]
    first_token: float
    tokens_per_second: float


def run(options: argparse.Namespace, worker_args: tuple[str, ...]) -> int:
    """Start everything, ask, print, stop; 1 when the server does not come up."""
    try:
        from kvc_recall.tasks import sample
    except ImportError as error:
        raise SettingsError(f"the demo needs the embedded model's package ({error})") from None
    try:
        prompt = sample("needles8", options.tokens, Random(options.seed))
    except ValueError as error:
        raise SettingsError(f"--tokens: {error}") from None
    model = options.embedded or RECALL
    embedded_model(model, ())  # fetched here, where it can be seen, if it must be
    console = Console()
    console.print(f"Starting a server to ask one question about {options.tokens:,} tokens ...")
    level = "info" if options.verbose else "warning"
    program = gateway("--embedded", model, "--log-level", level, "--", *worker_args)
    try:
        with launched(program, verbose=options.verbose) as server, server.client(120) as client:
            other = sample("needles8", options.tokens, Random(options.seed + 1))
            for rate in (1, RATES[-1]):  # warm up on another document; not shown
                ask(client, other.text, rate)
            answers = {rate: ask(client, prompt.text, rate) for rate in RATES}
    except (LaunchFailed, DemoFailed, httpx.HTTPError) as error:
        print(f"sgl-kvc demo: {error}", file=sys.stderr)
        return 1
    question = prompt.text.rsplit(" . ", 1)[-1]
    console.print(f"{question}  (expected: {prompt.answer})")
    console.print(table(answers, prompt.answer))
    return 0


def ask(client: httpx.Client, text: str, rate: float) -> Answer:
    """One streamed chat completion, then a longer one that times decoding. Raises DemoFailed.

    `client` has the gateway's URL as its base.
    """
    answer, report, first_token, _ = _stream(client, text, rate, {"max_tokens": 32})
    long = {"max_tokens": _TIMED_TOKENS, "ignore_eos": True}
    *_, decoding = _stream(client, text, rate, long)
    speed = (_TIMED_TOKENS - 1) / decoding if decoding > 0 else 0.0
    return Answer(answer, report, first_token, speed)


def _stream(
    client: httpx.Client, text: str, rate: float, limits: dict[str, Any]
) -> tuple[str, dict[str, Any], float, float]:
    """Answer, report, and seconds to the first token and from there to the last."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "stream": True,
        "kv_compression": {"rate": rate},
        "cache_salt": f"rate {rate}",  # no prefix hits: every rate pays for its own prefill
    }
    words, report = "", dict[str, Any]()
    begin = first = last = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body | limits) as response:
        if response.status_code != 200:
            raise DemoFailed(f"rate {rate}: {response.read().decode()}")
        for chunk in _events(response):
            if "error" in chunk:
                raise DemoFailed(f"rate {rate}: {chunk['error']['message']}")
            report = chunk.get("kv_compression") or report
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    last = time.perf_counter()
                    first = last if not words else first
                    words += piece
    return words.strip(), report, first - begin, last - first


def table(answers: dict[int, Answer], expected: str) -> Table:
    """One row per rate."""
    out = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0,
        title="KVs kept per head, KiB of cache, time to first token", title_justify="left",
    )  # fmt: skip
    columns: tuple[tuple[str, JustifyMethod], ...] = (
        ("rate", "right"), ("answer", "left"), ("", "left"), ("\nmean", "right"),
        ("KVs\nmin", "right"), ("\nmax", "right"), ("KiB\nbefore", "right"),
        ("\nafter", "right"), ("first\nms", "right"), ("tokens\nper s", "right"),
    )  # fmt: skip
    for heading, side in columns:
        out.add_column(heading, justify=side, no_wrap=True, overflow="ellipsis")
    for rate, answer in answers.items():
        text = textwrap.shorten(answer.text, 24, placeholder=" ...")
        right = " ".join(expected.split()) in " ".join(answer.text.lower().split())
        kept = answer.report.get("kept_per_head", {})
        held = answer.report.get("bytes", {})
        out.add_row(
            str(rate), text, "[green]right" if right else "[red]wrong",
            *(f"{kept[name]:,.0f}" if name in kept else "-" for name in ("mean", "min", "max")),
            *(f"{held[name] / 1024:,.0f}" if name in held else "-" for name in ("before", "after")),
            f"{answer.first_token * 1000:,.0f}", f"{answer.tokens_per_second:,.0f}",
        )  # fmt: skip
    return out


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:") and line[5:].strip() != "[DONE]":
            yield json.loads(line[5:])
