"""What a key may use, and that it never uses more."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st
from kvc_server.errors import ApiError
from kvc_server.quotas import Quotas
from kvc_server.settings import Settings
from kvc_server.tenants import Tenant

from tests.server.stub_worker import HANG, StubWorker, play
from tests.server.tenants import Keys

SERVER = Settings(worker_url="http://a")
GENERATE = "/generate"


def test_requests_per_minute(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", a={"requests_per_minute": 3}, b={})

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        posts = [client.post(GENERATE, json={}, headers=keys.headers("a")) for _ in range(12)]
        answers = await asyncio.gather(*posts)
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 3 + [429] * 9
        (refused, *_) = (answer for answer in answers if answer.status_code == 429)
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        other = await client.post(GENERATE, json={}, headers=keys.headers("b"))
        assert other.status_code == 200

    play(scenario, keys=str(keys.path))


def test_requests_at_once(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", a={"concurrency": 2}, b={"operator": True})

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.answer(HANG)
        headers = keys.headers("a")
        asked = [asyncio.create_task(client.post(GENERATE, json={}, headers=headers))
                 for _ in range(5)]  # fmt: skip
        while sum(task.done() for task in asked) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        done = [task.result().status_code for task in asked if task.done()]
        assert done == [429] * 3
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        worker.says(b"{}")
        deadline = time.monotonic() + 60
        while (await client.post(GENERATE, json={}, headers=headers)).status_code == 429:
            assert time.monotonic() < deadline
        worker.says(b"{}", 500)
        for _ in range(5):
            answer = await client.post(GENERATE, json={}, headers=headers)
            assert answer.status_code == 500, "what failed is over"

    play(scenario, keys=str(keys.path))


@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30),
    limit=st.integers(1, 100),
)
def test_tokens_of_a_minute_are_never_exceeded(
    requests: list[tuple[int, int]], limit: int
) -> None:
    """Whatever is reserved and given back, in whichever order."""
    quotas, used = Quotas(), 0
    tenant = Tenant("a", "n", SERVER, tokens_per_minute=limit)
    open_: list[Any] = []
    for most, really in requests:
        with contextlib.suppress(ApiError):
            open_.append((quotas.reserve(tenant, most), min(most, really)))
        if len(open_) > 2:
            reservation, took = open_.pop(0)
            quotas.settle(reservation, took)
            used += took
        assert used + sum(each.tokens for each, _ in open_) <= limit


def test_tokens_are_those_of_prompt_and_answer(tmp_path: Path) -> None:
    """What the answer did not take is given back; of what the client left before, nothing."""
    keys = Keys(tmp_path / "keys", a={"tokens_per_minute": 100}, b={})
    report = {"prompt_tokens": 10, "completion_tokens": 5}
    cards = {"data": [{"id": "m", "max_model_len": 50}]}

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(json.dumps(cards | {"kv_compression": report}).encode())
        sampling = {"max_new_tokens": 30}

        async def ask(ids: int = 10, params: dict = sampling) -> httpx.Response:
            body = {"input_ids": [1] * ids, "sampling_params": params}
            return await client.post(GENERATE, json=body, headers=keys.headers("a"))

        statuses = [(await ask()).status_code for _ in range(6)]
        assert statuses == [200] * 5 + [429], "15 each, and room for 40 before each"
        assert (await ask(10, {"max_new_tokens": 15})).status_code == 200
        large = await ask(10, {"max_new_tokens": 30, "n": 3})
        assert (large.status_code, large.json()["error"]["code"]) == (400, "request_too_large")
        assert (await ask(40)).status_code == 429, "the context has no room for more than 50"

    play(scenario, keys=str(keys.path))


def test_a_refused_request_takes_no_tokens(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", a={"tokens_per_minute": 60, "operator": True})
    body = {"input_ids": [1] * 10, "sampling_params": {"max_new_tokens": 30}}
    cards = b'{"data": [{"id": "m", "max_model_len": 50}]}'

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.by_path["/v1/models"] = cards
        worker.says(b'{"message": "no"}', 400)
        for _ in range(4):
            answer = await client.post(GENERATE, json=body, headers=keys.headers("a"))
            assert answer.status_code == 400
        worker.says(b"{}")
        statuses = []
        for _ in range(2):
            answer = await client.post(GENERATE, json=body, headers=keys.headers("a"))
            statuses.append(answer.status_code)
        assert statuses == [200, 429], "an answer that does not tell what it took took it all"

    play(scenario, keys=str(keys.path))
