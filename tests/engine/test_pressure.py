"""A pool that is too small: requests that allow it are compressed instead of retracted."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.conftest import prompt
from tests.servers import Engine, assert_no_leak

REQUESTS = 12


def crowd(
    server: Engine, name: str, knob: dict | None, answer: int = 200
) -> tuple[list[dict], int, int]:
    """Answers of requests that come at once; how many decoded together; how many retractions."""
    with server.client() as client:
        client.post("/flush_cache", params={"timeout": 30}).raise_for_status()
    seen = len(server.log.read_text())

    def ask(number: int) -> dict:
        ids = prompt(600, seed=f"{name} {number}")
        return server.generate(ids, knob, max_new_tokens=answer, ignore_eos=True)

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    log = server.log.read_text()[seen:]
    together = re.findall(r"Decode batch.* #running-req: (\d+)", log)
    return answers, max(map(int, together)), len(re.findall(r"[Rr]etract", log))


def test_who_waits_is_let_in(hasty_server):
    """A pool for 6 uncompressed requests."""
    answers, together, retracted = crowd(hasty_server, "pressure", {"on_pressure": 4})
    assert [len(answer["output_ids"]) for answer in answers] == [200] * REQUESTS
    assert retracted == 0
    reports = [answer["kv_compression"] for answer in answers]
    assert {report["on_pressure"] for report in reports} == {4}
    assert {report["rate"] for report in reports} <= {1, 4}
    assert sum(report["rate"] == 4 for report in reports) >= REQUESTS // 2
    assert all(report["skipped"] is None for report in reports)
    _, plain, _ = crowd(hasty_server, "pressure", None)
    assert plain <= 6
    assert together >= 10
    assert_no_leak(hasty_server)


def test_with_memory_enough_nothing_is_compressed(server):
    ids = prompt(600, seed="alone")
    plain = server.generate(ids, max_new_tokens=20, ignore_eos=True)
    free = server.generate(ids, {"on_pressure": 4}, max_new_tokens=20, ignore_eos=True)
    assert free["output_ids"] == plain["output_ids"]
    report = free["kv_compression"]
    assert (report["rate"], report["on_pressure"], report["skipped"]) == (1, 4, None)


@pytest.mark.parametrize("every", [0, 64])
def test_long_answers_are_compressed_again_instead_of_retracted(hasty_server, every):
    """Compressed once, 12 requests of 150 + 400 tokens are more than the pool holds."""
    knob = {"on_pressure": 4, "recompress_every": every}
    answers, _, retracted = crowd(hasty_server, f"again {every}", knob, answer=400)
    assert [len(answer["output_ids"]) for answer in answers] == [400] * REQUESTS
    assert retracted == 0
    again = [answer["kv_compression"].get("decode", {}).get("recompressed") for answer in answers]
    assert sum(bool(times) for times in again) >= REQUESTS // 2
    assert_no_leak(hasty_server)
