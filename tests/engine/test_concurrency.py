"""What is freed is used: more requests decode together, as soon as memory allows."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from tests.engine.conftest import prompt
from tests.servers import Engine

REQUESTS = 16


def largest_batch(server: Engine, rate: float) -> int:
    """Of `REQUESTS` requests of 500 tokens that come at once, how many decoded together."""
    with server.client() as client:
        client.post("/flush_cache", params={"timeout": 30}).raise_for_status()
    seen = len(server.log.read_text())

    def ask(number: int) -> dict:
        ids = prompt(500, seed=f"{rate} {number}")
        return server.generate(ids, {"rate": rate}, max_new_tokens=60, ignore_eos=True)

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    assert [len(answer["output_ids"]) for answer in answers] == [60] * REQUESTS
    # Lines about prefill count requests that have just ended, too.
    batches = re.findall(r"Decode batch.* #running-req: (\d+)", server.log.read_text()[seen:])
    return max(map(int, batches))


def test_freed_memory_is_used_at_once(small_server):
    """A pool for 7 uncompressed requests; at rate 32 all 16 fit, before the first one ends.

    That they run together, and not one group after another, needs SGLang to look at its
    waiting queue when compression makes room (``admit_more``).
    """
    assert 4 <= largest_batch(small_server, 1) <= 8
    assert largest_batch(small_server, 32) >= 14
