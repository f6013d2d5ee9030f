"""Admission by memory: what fits is let in, in order, and nothing stays claimed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc_server.errors import ApiError
from kvc_server.footprint import Asked, Prompt
from kvc_server.memory import Claim, Memory, Pool, Waiting

from sgl_kvc.spec import chained_digests, parse
from tests.server.stub_worker import HANG, StubWorker, play

PAGE = 16
POOL = Pool(40, PAGE)
GENERATE = "/generate"


def asked(
    length: int, answer: int = 16, rate: float = 1, *, priority: int = 0, max_rate: Any = None,
    same: int | None = None,
) -> Asked:  # fmt: skip
    """One prompt; those with an equal `same` begin alike."""
    tokens = [same if same is not None else random.randrange(1 << 30)] * length
    digests = chained_digests(tokens, None, PAGE)
    prompt = Prompt(parse({"rate": rate}), length, answer, 1, digests)
    return Asked((prompt,), max_rate, priority)


async def turn() -> None:
    """Let every task go on as far as it can."""
    for _ in range(3):
        await asyncio.sleep(0)


STEPS = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 700), st.integers(0, 200),
              st.sampled_from([1, 2, 8]), st.sampled_from([None, 16.0]),
              st.integers(-1, 1), st.sampled_from([None, 7])),
    st.tuples(st.sampled_from(["release", "cancel", "release and cancel"]), st.integers(0, 9)),
    st.just(("turn",)),
)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(steps=st.lists(STEPS, max_size=40))
def test_claims_never_leak_and_never_exceed_the_pool(steps: list[tuple]) -> None:
    """Whoever comes, waits, leaves and ends, in whichever order; also just after being let in."""

    async def live() -> None:
        memory = Memory(Waiting(1000, 5))
        tasks: list[asyncio.Task[Claim]] = []
        running: list[Claim] = []
        for step in steps:
            if step[0] == "admit":
                _, length, answer, rate, max_rate, priority, same = step
                ask = asked(length, answer, rate, priority=priority, max_rate=max_rate, same=same)
                tasks.append(asyncio.create_task(memory.admit(ask, POOL)))
            if "release" in step[0] and running:
                memory.release(running.pop(step[1] % len(running)))
            if "cancel" in step[0] and tasks:
                tasks[step[1] % len(tasks)].cancel()
            if step[0] == "turn":
                await turn()
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                with contextlib.suppress(ApiError, asyncio.CancelledError):
                    running.append(task.result())
            assert memory.held <= POOL.blocks or memory.admitted == 1
            assert memory.waiting <= 5
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for claim in running:
            memory.release(claim)
        await turn()
        assert (memory.held, memory.admitted, memory.waiting) == (0, 0, 0)

    asyncio.run(live())


def test_who_is_cancelled_just_after_being_let_in_holds_nothing() -> None:
    async def live() -> None:
        memory = Memory(Waiting())
        first = await memory.admit(asked(30 * PAGE), POOL)
        second, third = (
            asyncio.create_task(memory.admit(asked(30 * PAGE), POOL)) for _ in range(2)
        )
        await turn()
        memory.release(first)
        second.cancel()  # before it has run again
        await turn()
        assert second.cancelled()
        assert (memory.admitted, memory.held) == (1, 31)
        memory.release(third.result())
        assert memory.held == 0

    asyncio.run(live())


def test_nobody_waits_without_need() -> None:
    """Whoever is first in line is let in as soon as there is room."""

    async def live() -> None:
        memory = Memory(Waiting())
        first = await memory.admit(asked(30 * PAGE), POOL)
        second = asyncio.create_task(memory.admit(asked(20 * PAGE), POOL))
        small = asyncio.create_task(memory.admit(asked(PAGE), POOL))
        urgent = asyncio.create_task(memory.admit(asked(30 * PAGE, priority=1), POOL))
        await turn()
        assert (memory.waiting, memory.held) == (3, 31), "the small one does not overtake"
        memory.release(first)
        await turn()
        assert urgent.done()
        assert not second.done()
        memory.release(urgent.result())
        await turn()
        assert second.done()
        assert small.done()
        assert memory.held == 23

    asyncio.run(live())


def test_waiting_ends() -> None:
    async def live() -> None:
        memory = Memory(Waiting(0.05, 1))
        await memory.admit(asked(30 * PAGE), POOL)
        waiting = asyncio.create_task(memory.admit(asked(30 * PAGE), POOL))
        await turn()
        with pytest.raises(ApiError, match="wait for room") as many:
            await memory.admit(asked(PAGE), POOL)
        with pytest.raises(ApiError, match="had no room") as late:
            await waiting
        assert (many.value.status, late.value.status) == (429, 429)
        assert int(late.value.headers["Retry-After"]) > 0
        assert (memory.waiting, memory.held) == (0, 31)

    asyncio.run(live())


def test_a_rate_is_raised_as_far_as_it_has_to_be() -> None:
    async def live() -> None:
        memory = Memory(Waiting(0.01, 1))
        elastic = asked(20 * PAGE, 0, 1, max_rate=8)
        assert (await memory.admit(elastic, POOL)).rate is None, "there is room for two"
        for held, rate in ((10, 4.444), (15, 8), (18, None)):
            memory = Memory(Waiting(0.01, 1))
            await memory.admit(asked(held * PAGE, 0), POOL)
            claim = await memory.admit(elastic, POOL)
            assert claim.rate == rate
            assert memory.held + claim.footprint.prefill <= POOL.blocks
        with pytest.raises(ApiError):
            await memory.admit(asked(20 * PAGE, 0, 1, max_rate=8), POOL)

    asyncio.run(live())


def test_what_begins_alike_counts_once() -> None:
    async def live() -> None:
        memory = Memory(Waiting(0.01, 1))
        claims = [await memory.admit(asked(20 * PAGE, 16, same=3), POOL) for _ in range(5)]
        assert memory.held == 25
        for claim in claims[:4]:
            memory.release(claim)
        assert memory.held == 21, "the last reader still holds what was shared"

    asyncio.run(live())


def info(blocks: int) -> dict[str, bytes]:
    """What a worker tells of a pool, by path."""
    told = {"page_size": PAGE, "max_total_num_tokens": blocks * PAGE, "max_req_input_len": 1000,
            "internal_states": [{"kv_cache": []}]}  # fmt: skip
    return {"/server_info": json.dumps(told).encode(), "/metrics": b""}


def body(length: int, knob: dict | None = None) -> dict[str, Any]:
    ids = [random.randrange(1 << 16) for _ in range(length)]
    sampling = {"max_new_tokens": PAGE}
    return {"input_ids": ids, "sampling_params": sampling, "kv_compression": knob}


def test_who_does_not_fit_waits_at_the_gateway() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.by_path |= info(40)
        worker.answer(HANG)
        first = asyncio.create_task(client.post(GENERATE, json=body(500)))
        await until(client, "kvc_admission_blocks", "admitted", 33)
        worker.answer(HANG)
        second = asyncio.create_task(client.post(GENERATE, json=body(480)))
        await until(client, "kvc_admission_waiting", None, 1)
        leaves = asyncio.create_task(client.post(GENERATE, json=body(480)))
        await until(client, "kvc_admission_waiting", None, 2)
        leaves.cancel()
        await until(client, "kvc_admission_waiting", None, 1)
        worker.says(b"{}")
        first.cancel()  # its client leaves
        assert (await second).status_code == 200
        await until(client, "kvc_admission_blocks", "admitted", 0)

    play(scenario, room=Waiting(60, 8))


def test_no_room_is_429() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.by_path |= info(40)
        worker.answer(HANG)
        first = asyncio.create_task(client.post(GENERATE, json=body(500)))
        await until(client, "kvc_admission_blocks", "admitted", 33)
        refused = await client.post(GENERATE, json=body(500))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "kv_pool_full")
        assert int(refused.headers["retry-after"]) > 0
        first.cancel()

    play(scenario, room=Waiting(0.1, 8))


def test_a_raised_rate_is_sent_and_told() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.by_path |= info(60)
        worker.answer(HANG)
        first = asyncio.create_task(client.post(GENERATE, json=body(320)))
        await until(client, "kvc_admission_blocks", "admitted", 21)
        worker.says(b'{"kv_compression": {"policy": "kv-compress", "rate": 4.0, "skipped": null}}')
        knob = {"rate": 1, "elastic": {"max_rate": 4}}
        answer = await client.post(GENERATE, json=body(480, knob))
        sent = json.loads(worker.body)["sampling_params"]["custom_params"]["kv_compression"]
        told = answer.json()["kv_compression"]["elastic"]
        assert sent["rate"] == 4
        assert "elastic" not in sent
        assert told == {"asked": 1.0, "max_rate": 4.0, "given": sent["rate"]}
        roomy = await client.post(GENERATE, json=body(100, knob))
        assert roomy.json()["kv_compression"]["elastic"]["given"] == 1.0
        first.cancel()

    play(scenario, room=Waiting(0.1, 8))


def test_a_worker_that_does_not_tell_is_not_waited_for() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.by_path["/server_info"] = b"{}"
        worker.says(b"{}")
        for _ in range(3):
            assert (await client.post(GENERATE, json=body(900))).status_code == 200

    play(scenario, room=Waiting(0.1, 0))


async def until(client: httpx.AsyncClient, name: str, label: str | None, value: float) -> None:
    """Wait until a gauge of the gateway's says so; what the worker answers stays as it is."""
    while True:
        text = (await client.get("/metrics")).text
        labels = "" if label is None else f'{{of="{label}"}}'
        if f"{name}{labels} {value:.1f}\n" in text:
            return
        await asyncio.sleep(0.02)
