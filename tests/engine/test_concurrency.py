"""What is freed is used: more requests decode together, as soon as memory allows."""

from __future__ import annotations

import asyncio

from bench.throughput import Load, measure
from tests.tiny_models import VOCABULARY


def test_freed_memory_is_used_at_once(small_server):
    """A pool for 7 uncompressed requests; at rate 32 all 16 fit, before the first one ends.

    That they run together, and not one group after another, needs SGLang to look at its
    waiting queue when compression makes room (``admit_more``).
    """
    load = Load(requests=16, input_tokens=500, output_tokens=60, vocabulary=VOCABULARY)
    batch = {
        rate: asyncio.run(measure(small_server, load, rate, seed=int(rate))).largest_batch
        for rate in (1, 32)
    }
    assert 4 <= batch[1] <= 8
    assert batch[32] >= 14
