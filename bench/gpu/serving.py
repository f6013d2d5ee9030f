"""Plain SGLang against sgl-kvc on one GPU, in one run, on a model without real weights.

The set-up of arXiv 2410.00161, section 4: many prompts at once, a pool as a 24 GB card leaves it.
Random weights generate garbage, and as much of it as is asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu import models
from bench.gpu.load import Load, measure
from bench.gpu.records import Records

ROOT = Path(__file__).parents[2]
#: Weights to invent and CUDA graphs to capture.
_START_TIMEOUT_S = 420
#: Where SGLang looks for us.
_PLUGINS = "sglang.srt.plugins"


def run(records: Records, part: str, args: argparse.Namespace) -> None:
    """Part `serving` or `overhead`; without SGLang one record that says so."""
    missing = [name for name in ("sglang", "httpx") if importlib.util.find_spec(name) is None]
    if missing:
        records.add(part, status="skipped", reason=f"{', '.join(missing)} cannot be imported")
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(records, args, Path(folder))
        if part == "serving":
            bench.by_rate()
        else:
            bench.overhead()
            bench.compression()
            bench.long_context()


@dataclasses.dataclass(frozen=True)
class Servers:
    """The servers that run, ours and plain; None for one that did not start."""

    by_kind: dict

    def __call__(self, ours: bool):
        if self.by_kind[ours] is None:
            raise RuntimeError("the server did not start")
        return self.by_kind[ours]


class Bench:
    """Servers of one model and what is asked of them."""

    def __init__(self, records: Records, args: argparse.Namespace, folder: Path):
        self._records, self._args = records, args
        config = models.TINY if args.smoke else models.LLAMA
        self._vocabulary = config["vocab_size"]
        self._model = models.write(folder / "model", config)
        self._installed = source_tree(folder)

    def by_rate(self) -> None:
        """Every input length with every pool: plain SGLang, then each rate."""
        rates = self._args.rates
        for pool in self._args.pool:
            if pool:
                with self._both(pool) as servers:
                    self._rounds(servers, pool, [None, *rates])
                continue
            for some in ([None], rates):  # one pool takes all memory
                with self._one(pool, some[0] is not None) as servers:
                    self._rounds(servers, pool, some)

    def _rounds(self, servers: Servers, pool: int, rates: list[float | None]) -> None:
        for length, rate in itertools.product(self._args.inputs, rates):
            facts = {"pool": pool, "input": length, "rate": rate}
            self._round("round", servers, self._load(length), rate, facts)

    def overhead(self) -> None:
        """Rate 1 against plain SGLang, in turn, after a round of each that does not count."""
        pool = next((p for p in self._args.pool if p), 43000)
        length = self._args.inputs[0]
        with self._both(pool) as servers:
            ratios = {"tokens_per_s": [], "itl_ms": [], "ttft_ms": []}
            for number in range(self._args.rounds + 1):
                found = []
                for rate in (None, 1):
                    facts = {"pool": pool, "input": length, "rate": rate, "warm_up": not number}
                    facts["round"] = number
                    load = self._load(length)
                    found.append(self._round("overhead", servers, load, rate, facts))
                if number and all("tokens_per_s" in each for each in found):
                    for key, each in ratios.items():
                        each.append(found[1][key] / found[0][key])
        with self._records.attempt("ratio", input=length, rounds=self._args.rounds) as record:
            for key, each in ratios.items():
                record[key] = {"median": statistics.median(each), "range": [min(each), max(each)]}

    def compression(self) -> None:
        """What compression adds to a prompt and three tokens, as a share of them at rate 1.

        Three, for a prompt is compressed before its first or second decode step.
        """
        length = self._args.prompt
        pool = next((p for p in self._args.pool if p), 43000)
        taken = {1: [], 8: []}
        with self._one(pool, True) as servers:
            for number, rate in itertools.product(range(self._args.rounds + 1), taken):
                facts = {"pool": pool, "input": length, "rate": rate, "round": number}
                found = self._round("prompt", servers, self._load(length, 1, 3), rate, facts)
                if number and "seconds" in found:  # the first compiles
                    taken[rate].append(found["seconds"])
        with self._records.attempt("compression", input=length, rate=8) as record:
            plain, compressed = (statistics.median(each) for each in taken.values())
            record["rate_1_ms"], record["added_ms"] = 1e3 * plain, 1e3 * (compressed - plain)
            record["share"] = compressed / plain - 1

    def long_context(self) -> None:
        """Latency between tokens with many long prompts at rate 8; plain with what fits."""
        for rate in (8, None):
            with self._one(0, rate is not None) as servers:
                facts = {"pool": 0, "input": self._args.context, "rate": rate}
                load = self._load(self._args.context, self._args.batch)
                self._round("long context", servers, load, rate, facts)

    def _load(self, length: int, requests: int | None = None, output: int | None = None) -> Load:
        args = self._args
        return Load(
            requests or args.requests, length, output or args.output_tokens, self._vocabulary
        )

    def _round(
        self,
        name: str,
        servers: Servers,
        load: Load,
        rate: float | None,
        facts: dict,
    ) -> dict:
        """One record; what it holds."""
        with self._records.attempt(name, requests=load.requests, **facts) as found:
            server = servers(rate is not None)
            found |= asyncio.run(measure(server, load, rate))
        return found

    @contextlib.contextmanager
    def _both(self, pool: int) -> Iterator[Servers]:
        """Plain and ours side by side, so that they can take turns."""
        with contextlib.ExitStack() as stack:
            yield Servers({ours: self._start(stack, pool, ours) for ours in (False, True)})

    @contextlib.contextmanager
    def _one(self, pool: int, ours: bool) -> Iterator[Servers]:
        """One server alone."""
        with contextlib.ExitStack() as stack:
            yield Servers({ours: self._start(stack, pool, ours)})

    def _start(self, stack: contextlib.ExitStack, pool: int, ours: bool):
        """A server that `stack` ends, warmed up; None, and a record, if it does not start."""
        server = None
        with self._records.attempt("start", pool=pool, ours=ours) as found:
            begin = time.perf_counter()
            server = stack.enter_context(self._server(pool, ours))
            found["seconds"] = time.perf_counter() - begin
            load = Load(8, min(self._args.inputs), 16, self._vocabulary)
            for rate in (1, 8) if ours else (None, None):  # kernels are compiled at first use
                asyncio.run(measure(server, load, rate))
        return server

    def _server(self, pool: int, ours: bool) -> contextlib.AbstractContextManager:
        """SGLang on the dummy model, as it comes or with the plugin; killed on exit."""
        from kvc_server.launch import launched, sglang

        arguments = ["--load-format", "dummy", "--skip-tokenizer-init"]
        arguments += ["--decode-log-interval", "1", "--incremental-streaming-output"]
        env = dict(self._installed)
        on_cpu = not torch.cuda.is_available()
        if pool or on_cpu:  # there, all memory is other processes' as well
            arguments += ["--max-total-tokens", str(pool or 8192)]
        if ours:
            arguments += ["--attention-backend", "kvc"]
        elif on_cpu:
            arguments += ["--attention-backend", "torch_native", "--page-size", "16"]
        else:
            env["SGLANG_PLUGINS"] = "none"
        if on_cpu:
            env["TRITON_INTERPRET"] = "0"
        program = sglang(self._model, *arguments)
        return launched(program, env=env, within_s=_START_TIMEOUT_S)


def source_tree(folder: Path) -> dict[str, str]:
    """Environment in which SGLang finds this tree and its plugin, installed or not."""
    paths = [str(ROOT / name) for name in ("", "kernels", "server", "models")]
    found = importlib.metadata.entry_points(group=_PLUGINS)
    if "sgl_kvc" not in {entry.name for entry in found}:
        subprocess.run(
            [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "egg_info",
             "--egg-base", str(folder)],
            cwd=ROOT, check=True,
        )  # fmt: skip
        paths.append(str(folder))
    return {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
