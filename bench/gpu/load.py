"""What a server of the GPU bench is sent in one round, and what is measured of the answers."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
import statistics
import time
from random import Random

_ROUND_TIMEOUT_S = 1800


@dataclasses.dataclass(frozen=True)
class Load:
    """What one round sends, all at once; no prompt shares a prefix with another."""

    requests: int
    input_tokens: int
    output_tokens: int
    vocabulary: int


async def measure(server, load: Load, rate: float | None) -> dict:
    """Send all requests, wait for the last: latencies over requests, tokens over all of it."""
    seen = len(server.log.read_text())
    async with server.async_client(timeout=_ROUND_TIMEOUT_S) as client:
        (await client.post("/flush_cache", params={"timeout": 30})).raise_for_status()
        bodies = [_body(load, rate, seed) for seed in range(load.requests)]
        begin = time.perf_counter()
        answers = await asyncio.gather(*(_times(client, body) for body in bodies))
        seconds = time.perf_counter() - begin
    log = server.log.read_text()[seen:]
    batches = [int(number) for number in re.findall(r"#running-req: (\d+)", log)]
    times = [arrivals for _, arrivals in answers]
    ends = [answer for answer, _ in answers]
    if any(end["meta_info"]["completion_tokens"] != load.output_tokens for end in ends):
        raise RuntimeError("a request ended early")
    first = [arrivals[0] - begin for arrivals in times]
    gaps = sorted(b - a for arrivals in times for a, b in itertools.pairwise(arrivals))
    each = [
        (arrivals[-1] - arrivals[0]) / (load.output_tokens - 1)
        for arrivals in times
        if load.output_tokens > 1
    ]
    full = sorted(  # while every request is generating
        b - a
        for arrivals in times
        for a, b in itertools.pairwise(arrivals)
        if a >= max(t[0] for t in times) and b <= min(t[-1] for t in times)
    )
    achieved = [end.get("kv_compression", {}).get("rate_achieved") for end in ends]
    return {
        "seconds": seconds,
        "tokens_per_s": load.requests * load.output_tokens / seconds,
        "ttft_ms": 1e3 * statistics.median(first),
        "ttft_p99_ms": 1e3 * sorted(first)[int(0.99 * (len(first) - 1))],
        "itl_ms": 1e3 * statistics.median(each),  # of a request's mean, pauses included
        "gap_ms": 1e3 * statistics.median(gaps),
        "gap_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
        "gap_full_batch_ms": 1e3 * statistics.median(full) if full else None,
        "largest_batch": max(batches, default=None),
        "rate_achieved": None if None in achieved else statistics.mean(achieved),
    }


async def _times(client, body: dict) -> tuple[dict, list[float]]:
    """The last chunk of a streamed answer, and when each chunk came."""
    arrivals, last = [], ""
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                arrivals.append(time.perf_counter())
                last = line[6:]
    answer = json.loads(last)
    if "error" in answer:
        raise RuntimeError(str(answer["error"])[:500])
    return answer, arrivals


def _body(load: Load, rate: float | None, seed: int) -> dict:
    from kvc_server.generate import generate_body

    ids = Random(seed).choices(range(16, load.vocabulary), k=load.input_tokens)
    knob = None if rate is None else {"rate": rate}
    sampling = {"max_new_tokens": load.output_tokens, "ignore_eos": True}
    return generate_body(ids, knob, **sampling) | {"stream": True}
