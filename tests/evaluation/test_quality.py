"""Right answers at rate 8, through the gateway, on the embedded model (a small `make quality`)."""

from __future__ import annotations

import json
from pathlib import Path

from kvc_server.cli import main

from tests.gateways import Gateway

TASKS = ("single", "needles8", "needles32")
N = 32  # a task


def test_rate_eight_answers_as_well_as_uncompressed(gateway: Gateway, tmp_path: Path) -> None:
    assert main([
        "eval", "--url", gateway.url, "--suite", "recall", "--tasks", *TASKS, "--rates", "8",
        "--policies", "kv-compress", "random", "--n", str(N * len(TASKS)), "--concurrent", "8",
        "--out", str(tmp_path),
    ]) == 0  # fmt: skip
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [cell["skipped"] for cell in cells] == [0, 0, 0]
    by_policy = {cell["policy"]: cell["tasks"] for cell in cells}
    for task in TASKS:
        off, good, bad = (
            by_policy[policy][task]["score"] for policy in ("off", "kv-compress", "random")
        )
        assert by_policy["off"][task]["n"] == N
        assert off >= 0.9
        assert good >= 0.97 * off - 1 / N
        assert bad <= 0.5, "the test can tell policies apart"
