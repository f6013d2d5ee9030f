"""The GPU benchmark at tiny sizes: kernels and bandwidth in Triton's interpreter, the report.

Not covered: CUDA graphs, waits for the device, FlashInfer and the servers, which need a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from bench.gpu import bandwidth, report, served
from bench.gpu.batches import shares
from bench.gpu.cases import Case
from bench.gpu.records import Records, Skipped


def test_kernels_and_bandwidth(tmp_path):
    command = [sys.executable, "-m", "bench.gpu", "--smoke", "--out", str(tmp_path)]
    command += ["--part", "kernels", "--part", "bandwidth"]
    subprocess.run(command, check=True, timeout=300)
    for part in ("kernels", "bandwidth"):
        records = json.loads((tmp_path / f"{part}.json").read_text())["records"]
        for record in records:
            dense = record.get("backend") in ("fa3", "flashinfer")
            unmeasured = record["name"] in ("no sync", "graph") or dense
            assert record["status"] == "ok" or (unmeasured and record["status"] == "skipped")
        assert sum(record["status"] == "ok" for record in records) > 10
    page = (tmp_path / "report.md").read_text()
    assert "| decode |" in page
    for what in ("ours, sigma 0 ", "ours, sigma 1.2, 8 bits", "compact, of the copy"):
        assert f"| {what}" in page
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


def test_the_report_of_bandwidth(tmp_path):
    """Shares are of the copy that was measured beside."""
    records = Records(tmp_path, "bandwidth", {})
    records.add("copy", status="ok", bytes=1, gb_per_s=4000.0)
    step = {"status": "ok", "requests": 64, "kvs": 750, "ms": 2.0}
    for backend, bits, sigma, speed in (
        ("triton", 16, 1.2, 3600.0), ("triton", 8, 0.0, 3000.0), ("fa3", 16, None, 3400.0),
    ):
        found = step | {"backend": backend, "bits": bits, "gb_per_s": speed}
        records.add("decode step", **found, **({} if sigma is None else {"sigma": sigma}))
    part = {"ms": 1.0, "host_ms": 0.5, "gb_per_s": 2000.0}
    records.add("compression", status="ok", prompts=4, tokens=2000, rate=8, ms=4.0,
                score=part, select=part | {"ms": 2.0}, compact=part)  # fmt: skip
    page = report.write(tmp_path).read_text()
    assert "| ours, sigma 1.2 | ours, sigma 0, 8 bits | fa3, dense |" in page
    assert "| 64 | 750 | 90% | 75% | 85% |" in page
    assert "| 4 | 2000 | 8 | 4.00 | 1.00 (25%) | 2.00 (50%) | 1.00 (25%) | 50% | 50% |" in page


def test_what_a_compression_is_timed_on(device, monkeypatch):
    """The product's functions: what is copied is what a prompt of these KVs would keep."""
    if device == "cuda":
        dtype = torch.bfloat16
    else:
        dtype = torch.float16
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = served.Prompts.make(Case(bandwidth.SMOKE, dtype, device), 2, 64, 4)
    scored = given.score(given.begin())
    assert all(scores.complete for scores in scored)
    chosen = scored[1].select()
    assert len(chosen.positions) == given.target[1].numel() * int(chosen.pages.numel()) * 8
    assert given.target.numel() == 2 * 64 // 8 // 4


def test_heads_are_as_unequal_as_asked():
    torch.manual_seed(0)
    equal, unequal = shares(4096, 256, 0.0), shares(256 * 1000, 256, 1.2)
    assert equal.unique().tolist() == [16]
    assert unequal.sum() == 256 * 1000
    assert unequal.double().log().std() == pytest.approx(1.2, rel=0.1)


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
