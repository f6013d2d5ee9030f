"""What the gateway adds to streams, with many at once; `bench.gateway` tells more of it."""

from __future__ import annotations

import asyncio
import resource

from bench.gateway import measure

STREAMS, ROUNDS = 500, 6


def test_five_hundred_streams_lose_nothing_and_wait_for_little() -> None:
    """Two chunks a second each. Other work may hold up a round, so the best of some counts.

    The gateway begins with fewer open files than it needs, as it does on most systems.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STREAMS, before[1]))
    try:
        rounds = asyncio.run(measure(STREAMS, chunks=24, interval=0.5, rounds=ROUNDS, until_ms=3.0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert {found["gateway"]["whole"] for found in rounds} == {STREAMS}
    assert min(found["added_ms"] for found in rounds) <= 3.0, rounds
