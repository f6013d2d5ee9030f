"""Whatever is sent, it is never an error of ours, and nothing of it is kept."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from random import Random
from typing import Any

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from kvc_server import routes
from kvc_server.openapi import document
from schemathesis import GenerationMode

from tests.server.chats import chat
from tests.server.stub_worker import PATIENCE, StubWorker, play

BODIES = 2000
GROWTH = 24 << 20  # bytes; a body that stayed would be some kB, 2,000 of them more than this
KNOB = {"rate": 8, "policy": "snapkv", "window": 16}
VALID = chat("a" * 16000, kv_compression=KNOB, custom_params={}, sampling_params=[{}, {}])
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1e999, float("nan"), 10**400, "", "\ud800", [], [[]], {}, {"": None}, "8",
    {"rate": 8}, {"kv_compression": {"rate": 2}}, [{"custom_params": 1}],
)  # fmt: skip


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_what_the_document_allows_and_what_it_does_not(mode: GenerationMode) -> None:
    cases = schemathesis.openapi.from_dict(document()).as_strategy(generation_mode=mode)
    seen: set[str] = set()

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b'{"data": []}')

        @settings(max_examples=120, deadline=None, database=None, derandomize=True,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(case=cases)
        def send(case: schemathesis.Case) -> None:
            answer = case.call(base_url=str(client.base_url), timeout=PATIENCE)
            seen.add(case.path)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400 and case.method.upper() != "HEAD":
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}

        await asyncio.to_thread(send)

    play(scenario)
    assert len(seen) > 10


def test_two_thousand_malformed_bodies() -> None:
    random = Random(12)
    process = psutil.Process()

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        paths = [*routes.GENERATING, *routes.PASSED, routes.DOCUMENTS]
        statuses: dict[int, int] = {}

        async def send(bodies: list[bytes]) -> None:
            for body in bodies:
                answer = await client.post(random.choice(paths), content=body)
                assert answer.status_code < 500, (body[:300], answer.text)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

        async def many(count: int) -> int:
            """Send so many; the memory held afterwards."""
            bodies = [malformed(random) for _ in range(count)]
            await asyncio.gather(*(send(bodies[begin::16]) for begin in range(16)))
            bodies.clear()
            gc.collect()
            return process.memory_info().rss

        before = await many(BODIES // 4)
        after = await many(BODIES - BODIES // 4)
        assert after - before < GROWTH
        assert sum(statuses.values()) == BODIES
        assert statuses[400] > BODIES // 10
        assert statuses[200] > BODIES // 10

    play(scenario)


def malformed(random: Random) -> bytes:
    """A body that is broken in one of several ways, as text or as JSON."""
    return random.choice(WAYS)(random)


def cut(random: Random) -> bytes:
    text = json.dumps(VALID).encode()
    return text[: random.randrange(len(text))]


def scrambled(random: Random) -> bytes:
    text = bytearray(json.dumps(VALID | {"messages": []}).encode())
    for _ in range(random.randint(1, 8)):
        text[random.randrange(len(text))] = random.randrange(256)
    return bytes(text)


def noise(random: Random) -> bytes:
    return random.randbytes(random.randint(0, 2000))


def nested(random: Random) -> bytes:
    depth = random.randint(10, 20000)
    return b'{"kv_compression": ' + random.choice([b"[", b'{"a":']) * depth


def strange(random: Random) -> bytes:
    """JSON whose fields are of other types than they should be."""
    body = dict(VALID)
    for _ in range(random.randint(1, 3)):
        body[random.choice(list(VALID))] = random.choice(STRANGE)
    if random.random() < 0.5:
        field = random.choice([*KNOB, "budget", "recompress_every", "?"])
        body["kv_compression"] = KNOB | {field: random.choice(STRANGE)}
    return json.dumps(body if random.random() < 0.9 else random.choice(STRANGE)).encode()


WAYS: tuple[Callable[[Random], bytes], ...] = (cut, scrambled, noise, nested, strange)
