"""What is freed is used: more requests decode together, as soon as memory allows."""

from __future__ import annotations

import asyncio

from bench.throughput import Load, measure
from tests.tiny_models import VOCABULARY


def test_more_requests_run_together(small_server):
    """A pool for 7 uncompressed requests; at rate 8 a request's final size is an eighth."""
    load = Load(requests=24, input_tokens=500, output_tokens=80, vocabulary=VOCABULARY)
    batch = {
        rate: asyncio.run(measure(small_server, load, rate, seed=int(rate))).largest_batch
        for rate in (1, 8)
    }
    assert 4 <= batch[1] <= 8
    assert batch[8] >= 2 * batch[1]
