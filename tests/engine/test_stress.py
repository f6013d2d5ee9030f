"""500 mixed requests on a pool that is too small for them, a fifth aborted in mid-stream."""

from __future__ import annotations

import asyncio
import json
import random
import re

import httpx
from kvc_server.generate import generate_body

from tests.engine.conftest import prompt
from tests.servers import assert_no_leak

REQUESTS, AT_A_TIME = 500, 32
KNOBS = [
    None, {"rate": 1}, {"rate": 2}, {"rate": 4}, {"rate": 8}, {"rate": 32},
    {"rate": 4, "question_tokens": 15}, {"budget": 96, "recompress_every": 32},
    {"rate": 8, "policy": "h2o"}, {"rate": 8, "prefill_block": 256, "policy": "kv-compress"},
    {"budget": 96, "prefill_block": 128, "question_tokens": 15},
]  # fmt: skip


async def _one(client: httpx.AsyncClient, number: int, gate: asyncio.Semaphore) -> str:
    """Run one request; "complete", "aborted by us" or "reported"."""
    rng = random.Random(number)
    knob = rng.choice(KNOBS)
    tokens = rng.choice([rng.randint(20, 200), rng.randint(200, 2000)])
    length = rng.randint(1, 120)
    abort_after = rng.randint(1, length) if number % 5 == 0 else None
    body = generate_body(
        prompt(tokens, seed=number % 97, shared=tokens // 3),
        knob,
        max_new_tokens=length,
        ignore_eos=True,
    ) | {"stream": True}
    async with gate, client.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200, await response.aread()
        chunks = 0
        last: dict = {}
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                chunks += 1
                if "error" in last:
                    return "reported"
            if abort_after is not None and chunks >= abort_after:
                return "aborted by us"
    reason = last["meta_info"]["finish_reason"]
    if reason["type"] == "abort":
        return "reported"
    assert len(last["output_ids"]) == length
    report = last["kv_compression"]
    if knob and knob.get("rate", 1) > 1 and report["skipped"] is None:
        assert report["blocks"]["after"] < report["blocks"]["before"]
    return "complete"


async def _all(url: str) -> list[str]:
    gate = asyncio.Semaphore(AT_A_TIME)
    # SGLang closes a connection after 5 s without a request, even if one has come by then and
    # the server had no time to read it: a request on a kept one may be lost.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        return await asyncio.gather(*(_one(client, i, gate) for i in range(REQUESTS)))


def test_nothing_leaks_and_nobody_is_forgotten(small_server):
    outcomes = asyncio.run(_all(small_server.url))
    assert len(outcomes) == REQUESTS
    assert outcomes.count("aborted by us") >= REQUESTS // 10
    assert outcomes.count("complete") >= REQUESTS * 3 // 4
    log = small_server.log.read_text()
    assert re.search(r"[Rr]etract", log), "the pool was too large to force a retraction"
    assert_no_leak(small_server)
