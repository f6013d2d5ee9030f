"""What the gateway adds to streams, with many at once; `bench.gateway` tells more of it."""

from __future__ import annotations

import asyncio
import resource

from bench.gateway import measure

STREAMS, ROUNDS = 500, 4
#: Per chunk, that the gateway was ready to run and others had the cores: 30 us where nothing else
#: runs, several hundred where both are taken. Then latency tells of the others.
BUSY_US = 150
#: Per chunk, of the gateway's own: three times what it takes.
CPU_US = 1_350


def test_five_hundred_streams_lose_nothing_and_wait_for_little() -> None:
    """Two chunks a second each. Other work may hold up a round, so the best of some counts; where
    it held up all, what a chunk costs the gateway counts alone.

    The gateway begins with fewer open files than it needs, as it does on most systems.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STREAMS, before[1]))
    try:
        rounds = asyncio.run(measure(STREAMS, chunks=24, interval=0.5, rounds=ROUNDS, until_ms=3.0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert {found["gateway"]["whole"] for found in rounds} == {STREAMS}
    assert min(found["gateway"]["cpu_us_per_chunk"] for found in rounds) <= CPU_US, rounds
    quiet = [found for found in rounds if found["gateway"]["wait_us_per_chunk"] < BUSY_US]
    assert min((found["added_ms"] for found in quiet), default=0.0) <= 3.0, rounds
