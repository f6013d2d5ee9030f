"""`sgl-kvc eval`: from options to a grid; start a server if asked to, measure, write."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Any

from kvc_server.embedded import embedded_model
from kvc_server.launch import LaunchFailed
from kvc_server.settings import SettingsError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvc_eval import provenance, report, results, suites
from kvc_eval.embedded import embedded
from kvc_eval.endpoint import Endpoint, RequestFailed
from kvc_eval.grid import AFTER, INSIDE, QUESTIONS, TURNS, Grid
from kvc_eval.measure import EndpointLost, Load, measure
from kvc_eval.sample import Suite
from kvc_eval.store import Store
from sgl_kvc.spec import PRESETS

_DEFAULT_N = 200


def run(options: argparse.Namespace, worker_args: tuple[str, ...]) -> int:
    """Evaluate as `cli.check` left the options; returns and raises what `cli.run` does."""
    suite = _suite(options)
    try:
        with _servers(options, worker_args) as urls:
            done = asyncio.run(_evaluate(urls, suite, options))
    except (LaunchFailed, RequestFailed, EndpointLost) as error:
        _say(str(error))
        return 1
    print(f"The tables are in {options.out / report.REPORT}, the curves beside it.")
    if done["failed"]:
        _say(f"{done['failed']} requests failed; run the same command again to retry them")
    return 1 if done["failed"] else 0


async def _evaluate(urls: list[str], suite: Suite, options: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [
            await stack.enter_async_context(
                Endpoint(url, options.model, options.api_key, options.timeout)
            )
            for url in urls
        ]
        for one in endpoints:
            await one.probe()
        endpoint = endpoints[0]
        for other in endpoints[1:]:
            if (other.model, other.compresses) != (endpoint.model, endpoint.compresses):
                raise SettingsError(f"--url: {other.url} does not serve what {endpoint.url} does")
        grid = await _grid(endpoint, suite, options)
        load = Load(options.concurrent, _batched(endpoint, suite, grid, options))
        store = Store(options.out, grid)
        before = len(store.records())
        with _progress() as progress:
            bar = progress.add_task("answers", total=len(grid.all_cells()) * grid.n)
            await measure(endpoints, suite, grid, store, load, lambda n: progress.advance(bar, n))
    records = store.records()
    done = {
        "command": shlex.join(["sgl-kvc", *_said(sys.argv[1:])]),
        "arguments": grid.to_json(),
        "servers": len(endpoints),
        "concurrent": load.concurrent,
        "batched": load.batched,
        "compresses": endpoint.compresses,
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "seconds": round(time.perf_counter() - begin),
        "answers": len(records),
        "answers_in_seconds": len(records) - before,
        "failed": sum(record.failed is not None for record in records),
        "cells": results.summarise(records, grid),
    }
    report.write(options.out, done, grid)
    return done


def _suite(options: argparse.Namespace) -> Suite:
    try:
        kind = suites.load(options.suite)
    except ImportError as error:
        raise SettingsError(f"--suite {options.suite} cannot be used: {error}") from None
    if options.suite == "longbench":
        if options.tasks:
            raise SettingsError("--tasks: the tasks of longbench are the data sets in --data")
        return kind(options.data, options.metric, options.prompts)
    known = kind().tasks
    for task in options.tasks or ():
        if task not in known:
            raise SettingsError(f"--tasks: unknown task {task}; known are {', '.join(known)}")
    return kind(tuple(dict.fromkeys(options.tasks or known)), options.seed)


async def _grid(endpoint: Endpoint, suite: Suite, options: argparse.Namespace) -> Grid:
    """What is to be asked, as far as the endpoint can. Raises SettingsError."""
    questions = tuple(q for q in QUESTIONS if q in options.question)
    policies: tuple[str, ...] = ()
    forced = _forced(endpoint, suite, options)
    if endpoint.compresses:
        apart = forced or AFTER in questions
        if TURNS in questions and suite.turns == 1:
            raise SettingsError("--question turns needs the suite chats")
        policies = await _policies(endpoint, apart, TURNS in questions, options)
    else:
        questions = (INSIDE,)
        _say(f"{endpoint.url} does not report kv_compression; only uncompressed answers follow")
    n = options.n or suite.size or _DEFAULT_N
    if suite.size is not None and n > suite.size:
        raise SettingsError(f"--n: {options.data} has {suite.size} rows (asked for {n})")
    return Grid(
        suite=suite.name,
        model=endpoint.model,
        tasks=suite.tasks,
        lengths=tuple(dict.fromkeys(options.length)),
        questions=questions,
        policies=policies,
        rates=tuple(sorted(set(options.rates))),
        n=n,
        seed=options.seed,
        source=suite.source,
        commit=provenance.commit() if options.embedded else "",
        forced=forced,
    )


async def _policies(
    endpoint: Endpoint, apart: bool, turns: bool, options: argparse.Namespace
) -> tuple[str, ...]:
    """Those that were named, or all that the server has and takes. Raises SettingsError.

    `apart` is whether anything will be read after compression, `turns` whether a chat's turns
    will begin with what others left.

    Every kind of knob is asked with once, rather than found out to be refused 10,000 requests
    later.
    """
    usable = []
    for policy in dict.fromkeys(options.policies or await endpoint.policies() or PRESETS):
        knob = {"rate": max(options.rates), "policy": policy, "force": True}
        refusal = await endpoint.refusal(knob)
        if refusal is None and apart:
            refusal = await endpoint.refusal(knob | {"question_tokens": 1})
        if refusal is None and turns:
            refusal = await endpoint.refusal(knob | {"reuse": "compressed"})
        if refusal is None:
            usable.append(policy)
        elif options.policies:
            raise SettingsError(f"{endpoint.url} refuses {policy}: {refusal}")
        else:
            _say(f"{policy} is left out, {endpoint.url} refuses it: {refusal}")
    if not usable:
        raise SettingsError(f"{endpoint.url} takes no policy at rate {max(options.rates):g}")
    return tuple(usable)


def _forced(endpoint: Endpoint, suite: Suite, options: argparse.Namespace) -> bool:
    """Whether answers are given rather than decoded: the suite has to say how they begin."""
    can = endpoint.compresses and suite.name == "text"
    if options.forced and not can:
        raise SettingsError("--forced needs the suite text, and a server of ours")
    return can if options.forced is None else options.forced


def _batched(
    endpoint: Endpoint, suite: Suite, grid: Grid, options: argparse.Namespace
) -> bool:
    """Whether prompts go to /generate: the suite has to know them as the template renders them."""
    can = grid.forced or (endpoint.compresses and suite.name in ("recall", "chats"))
    if options.batched and not can:
        raise SettingsError(
            "--batched needs the suite recall or chats, whose prompts are known as the chat "
            "template renders them, or --forced, and a server of ours"
        )
    return can if options.batched is None else options.batched


@contextlib.contextmanager
def _servers(options: argparse.Namespace, worker_args: tuple[str, ...]) -> Iterator[list[str]]:
    """The URLs to ask."""
    if options.url:
        yield options.url
        return
    options.out.mkdir(parents=True, exist_ok=True)
    embedded_model(options.embedded, ())  # fetched here, where it can be seen, if it must be
    # A block's prompts in the tree, once more for policies that read nothing from it, segments.
    pool = str(max(32768, 3 * options.concurrent * max(options.length)))
    arguments = ("--max-total-tokens", pool, *worker_args)
    with embedded(options.embedded, options.out, options.servers, *arguments) as urls:
        yield urls


def _say(sentence: str) -> None:
    print(f"sgl-kvc eval: {sentence}", file=sys.stderr)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("left"),
        TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=2,
    )  # fmt: skip


def _said(arguments: list[str]) -> list[str]:
    """The command line without the key."""
    out = list(arguments)
    for i, argument in enumerate(arguments):
        if argument == "--api-key":
            out[i + 1] = "..."
        elif argument.startswith("--api-key="):
            out[i] = "--api-key=..."
    return out
