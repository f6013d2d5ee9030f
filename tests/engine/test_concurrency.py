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
        return server.generate(ids, {"rate": rate}, max_new_tokens=120, ignore_eos=True)

    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    assert [len(answer["output_ids"]) for answer in answers] == [120] * REQUESTS
    # Lines about prefill count requests that have just ended, too.
    batches = re.findall(r"Decode batch.* #running-req: (\d+)", server.log.read_text()[seen:])
    return max(map(int, batches))


def test_a_shared_system_prompt_is_held_once_and_less_than_plain(small_server):
    """Five requests with the same 30 blocks before their own 13; those in use while all decode."""
    shared, blocks, reports = prompt(480, seed="system"), {}, []
    for name, knob in (("plain", None), ("shared", {"rate": 8, "prefix_tokens": 480})):
        with small_server.client() as client:
            client.post("/flush_cache", params={"timeout": 30}).raise_for_status()
        seen = len(small_server.log.read_text())
        asked = [shared + prompt(200, seed=f"{name} {i}") for i in range(5)]
        answers = small_server.generate(asked, knob, max_new_tokens=32, ignore_eos=True)
        reports = [answer["kv_compression"] for answer in answers]
        log = small_server.log.read_text()[seen:]
        used = re.findall(r"Decode batch.* #running-req: 5.*#token: (\d+)", log)
        blocks[name] = {-(-int(tokens) // 16) for tokens in used} - {0}  # all have ended
    held = {"before": 43, "after": 2 + 1, "shared": 30}
    assert [report["blocks"] for report in reports] == [held] * 5
    answer = 2  # blocks of each answer, beside the prompt's last
    assert min(blocks["plain"]) >= 30 + 5 * 13
    assert max(blocks["shared"]) <= 30 + 5 * (held["after"] + answer)


def test_freed_memory_is_used_at_once(small_server):
    """A pool for 7 uncompressed requests; at rate 32 all 16 fit, before the first one ends.

    That they run together, and not one group after another, needs SGLang to look at its
    waiting queue when compression makes room (``admit_more``).
    """
    assert 4 <= largest_batch(small_server, 1) <= 8
    assert largest_batch(small_server, 32) >= 14
