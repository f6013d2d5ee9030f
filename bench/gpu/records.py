"""Records of a run, written one by one so that a run that is cut off keeps what it has; timing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.machine import describe

#: More than any GPU's L2 cache.
_FLUSH_BYTES = 256 << 20
#: Clock cycles that a device is kept busy for, some 25 ms, while the host launches what is timed.
_AHEAD = 50_000_000


class Skipped(Exception):
    """What a record cannot be measured for; no error."""


class Records:
    """The records of one part in ``<folder>/<part>.json``; runs add to what is there."""

    def __init__(self, folder: Path, part: str, arguments: dict):
        self._path = folder / f"{part}.json"
        self._part = part
        folder.mkdir(parents=True, exist_ok=True)
        self._all = {"runs": [], "records": []}
        if self._path.exists():
            self._all = json.loads(self._path.read_text())
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._all["runs"].append({"started": started, "arguments": arguments, **machine()})

    def add(self, name: str, **found) -> None:
        """Append a record and write the file."""
        record = {"part": self._part, "name": name, "run": len(self._all["runs"]) - 1, **found}
        self._all["records"].append(record)
        beside = self._path.with_suffix(".tmp")
        beside.write_text(json.dumps(self._all, indent=1, default=str) + "\n")
        os.replace(beside, self._path)
        print(f"{self._part} {name} {json.dumps(found, default=str)[:400]}", flush=True)

    @contextlib.contextmanager
    def attempt(self, name: str, **facts) -> Iterator[dict]:
        """Record `facts` and what the block puts into the dict; its exception is its error."""
        found = dict(facts)
        try:
            yield found
            found.setdefault("status", "ok")
        except (Skipped, torch.OutOfMemoryError) as reason:
            found |= {"status": "skipped", "reason": str(reason)}
        except Exception as error:
            where = "".join(traceback.format_exc())[-3000:]
            found |= {"status": "error", "error": f"{type(error).__name__}: {error}"[-3000:]}
            found["traceback"] = where
        self.add(name, **found)
        if torch.cuda.is_available():
            with contextlib.suppress(Exception):  # after a lost device, records go on
                torch.cuda.empty_cache()


def machine() -> dict:
    """Device and versions, wherever the source tree runs: little need be installed."""
    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "processors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        }
    versions = {"cuda": torch.version.cuda}
    for package in ("sglang", "sgl-kvc", "torch", "triton", "flashinfer-python"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit = "unknown"
    with contextlib.suppress(Exception):  # without git, or sglang not installed
        commit = describe()["commit"]
    return {
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": versions,
        "commit": os.environ.get("KVC_COMMIT", commit),
    }


def queued_ms(
    prepare: Callable[[], object],
    run: Callable[[Any], object],
    device: str,
    repeats: int = 10,
) -> dict:
    """Median milliseconds of ``run(prepare())`` on the device, and of the host to launch it.

    Launched one by one, as in serving. The device is busy before, so the host is ahead of it unless
    its own milliseconds are many more than 20.
    """
    taken, launching = [], []
    for _ in range(1 if device == "cpu" else repeats + 2):  # two to compile and warm up
        given = prepare()
        if device != "cpu":
            torch.cuda.synchronize()
            torch.cuda._sleep(_AHEAD)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        started = time.perf_counter()
        run(given)
        launching.append(1e3 * (time.perf_counter() - started))
        if device != "cpu":
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
    taken = taken[2:] or launching
    return {
        "ms": statistics.median(taken),
        "ms_range": [min(taken), max(taken)],
        "host_ms": statistics.median(launching[2:] or launching),
    }


def median_ms(run: Callable[[], object], device: str, repeats: int = 20) -> dict:
    """Median milliseconds of `run`, its range, and whether a CUDA graph was timed.

    In a graph, as in serving: a small kernel's launch would be measured in its place. L2 is
    flushed before every repeat.
    """
    if device == "cpu":
        begin = time.perf_counter()
        run()
        taken = 1e3 * (time.perf_counter() - begin)
        return {"ms": taken, "ms_range": [taken, taken], "graph": False}
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    replay, graphed = run, False
    with contextlib.suppress(RuntimeError):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay, graphed = graph.replay, True
    torch.cuda.synchronize()
    replay()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return {
        "ms": statistics.median(taken),
        "ms_range": [min(taken), max(taken)],
        "graph": graphed,
    }
