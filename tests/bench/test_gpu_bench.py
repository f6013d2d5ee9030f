"""The GPU benchmark at tiny sizes: kernels and bandwidth in Triton's interpreter, the report.

Not covered: CUDA graphs, waits for the device, FlashInfer and the servers, which need a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from bench.gpu import report
from bench.gpu.records import Records, Skipped


def test_kernels_and_bandwidth(tmp_path):
    command = [sys.executable, "-m", "bench.gpu", "--smoke", "--out", str(tmp_path)]
    command += ["--part", "kernels", "--part", "bandwidth"]
    subprocess.run(command, check=True, timeout=300)
    for part in ("kernels", "bandwidth"):
        records = json.loads((tmp_path / f"{part}.json").read_text())["records"]
        for record in records:
            unmeasured = record["name"] in ("no sync", "graph", "flashinfer")
            assert record["status"] == "ok" or (unmeasured and record["status"] == "skipped")
        assert sum(record["status"] == "ok" for record in records) > 10
    page = (tmp_path / "report.md").read_text()
    assert "| decode |" in page
    assert (tmp_path / "bandwidth.png").stat().st_size > 1000


def test_a_failure_is_a_record_and_the_rest_goes_on(tmp_path):
    records = Records(tmp_path, "kernels", {})
    for raised in (ValueError("odd shape"), torch.OutOfMemoryError("full"), Skipped("no GPU")):
        with records.attempt("decode", dtype="float32"):
            raise raised
    with Records(tmp_path, "kernels", {}).attempt("decode", dtype="float32") as found:
        found["max_abs_error"] = {"out": 0.5}
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert [r["status"] for r in found["records"]] == ["error", "skipped", "skipped", "ok"]
    assert [r["run"] for r in found["records"]] == [0, 0, 0, 1]
    page = report.write(tmp_path).read_text()
    assert "ValueError: odd shape" in page
    assert "| decode | 5.0e-01 |" in page


@pytest.mark.parametrize("value", [1e-3, float("nan")])
def test_what_differs_fails(value):
    from bench.gpu.kernels import distance

    got, expected = torch.zeros(2, 3), torch.zeros(2, 3)
    assert distance(got, expected, 1e-5) == (0.0, True)
    expected[1, 2] = value
    assert not distance(got, expected, 1e-5)[1]
    both = torch.full((2,), float("-inf"))
    assert distance(both, both.clone(), 1e-5) == (0.0, True)


def test_the_report_of_serving(tmp_path):
    times = {"ttft_ms": 10.0, "itl_ms": 2.0, "gap_ms": 2.0, "gap_full_batch_ms": None}
    records = Records(tmp_path, "serving", {})
    for pool in (43000, 0):
        for length in (500, 6000):
            for rate in (None, 1.0, 8.0):
                measured = {"tokens_per_s": 100 * (rate or 2), "largest_batch": 4} | times
                with records.attempt("round", pool=pool, input=length, rate=rate) as found:
                    found |= measured
    records = Records(tmp_path, "overhead", {})
    ratio = {"median": 1.0, "range": [0.9, 1.1]}
    records.add("ratio", status="ok", input=500, rounds=3,
                tokens_per_s=ratio, itl_ms=ratio, ttft_ms=ratio)  # fmt: skip
    records.add("compression", status="ok", input=8000, rate=8,
                rate_1_ms=200.0, added_ms=4.0, share=0.02)  # fmt: skip
    records.add("long context", status="ok", input=32000, rate=8, requests=64,
                largest_batch=64, **times)  # fmt: skip
    page = report.write(tmp_path).read_text()
    assert "| 43000 | 6000 | rate 8 | 800 | 4.00 | 4 | 10 | 2.0 | 2.0 |" in page
    assert "| tokens_per_s | 1.00 | 0.90-1.10 |" in page
    assert "prompt of 8000 to rate 8 adds 4.0 ms to 200.0 ms: 2.0%." in page
    assert (tmp_path / "serving.png").stat().st_size > 1000
