"""Right answers at rate 8, through the gateway, on the embedded model (a small `make quality`)."""

from __future__ import annotations

import argparse
import asyncio

from bench import quality


def test_rate_eight_answers_as_well_as_uncompressed(gateway):
    args = argparse.Namespace(
        tasks=["single", "needles8", "needles32"],
        policies=["kv-compress", "random"],
        rates=[8],
        n=32,
        tokens=1024,
    )
    records = asyncio.run(quality.measure(gateway.url, args))
    accuracy = {(r["task"], r["policy"]): r["accuracy"] for r in records}
    assert all(r["skipped"] == 0 for r in records)
    for task in args.tasks:
        assert accuracy[task, "off"] >= 0.9
        assert accuracy[task, "kv-compress"] >= 0.97 * accuracy[task, "off"] - 1 / args.n
        assert accuracy[task, "random"] <= 0.5, "the test can tell policies apart"
