"""Gateways of our own on an embedded model, for as long as they are needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kvc_server.launch import gateway, started


@contextlib.contextmanager
def embedded(model: str, folder: Path, count: int, *worker_args: str) -> Iterator[list[str]]:
    """`count` times `sgl-kvc serve` on free ports, all ready, stopped afterwards; their URLs.

    They share the cores evenly, unless OMP_NUM_THREADS is set. What they print goes to
    server-N.log in `folder`, `worker_args` go to SGLang. Raises LaunchFailed.
    """
    threads = max(1, (os.cpu_count() or 1) // count)
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    program = gateway("--embedded", model, "--log-level", "warning", "--", *worker_args)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(started(program, log=folder / f"server-{number}.log", env=env))
            for number in range(1, count + 1)
        ]
        for server in servers:
            server.wait_ready()
        yield [server.url for server in servers]
