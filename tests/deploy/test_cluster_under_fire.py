"""Gateway, SGLang's router and workers, as the chart renders them, while workers come and go.

There is no Kubernetes here, so the test does what it and the router's service discovery do: a
worker that is replaced is first taken off the router's list (as is a pod from the moment it
terminates), then told to stop, then started again in its place and put back on the list.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import random
import re
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import httpx
import psutil
import pytest
from kvc_server import launch
from kvc_server.cluster import ROUTERS

from tests.deploy.charts import needs_helm, paths

pytestmark = [
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in ROUTERS),
        reason="SGLang's router is not installed: pip install smg",
    ),
    pytest.mark.timeout(1800),  # four workers are started, one core each or less
]
CLIENTS = 16
LEAST = 200
VOCABULARY = ("the", "old", "river", "waits", "near", "quiet", "village", ".")


@dataclasses.dataclass
class Outcome:
    """What became of a request."""

    path: str
    sent_at: float
    status: int
    begun: bool  # a part of a stream arrived
    whole: bool


@dataclasses.dataclass
class Story:
    """What happened so far."""

    outcomes: list[Outcome]
    killed_at: float = float("inf")
    replaced: bool = False


@pytest.fixture(scope="module")
def cluster() -> Iterator[launch.Server]:
    python = ("-m", "kvc_server.cli", "cluster", "--workers", "3", "--log-level", "warning")
    pool = ("--", "--max-total-tokens", "16384")
    program = launch.Program(python, pool, ready="/readiness", stop_s=30)
    with launch.launched(program, within_s=600) as running:
        yield running


@needs_helm
def test_a_router_answers_its_probes(cluster: launch.Server) -> None:
    url, _ = parts(cluster)
    asked = paths("router")
    assert asked == {"/liveness", "/readiness"}
    for path in asked:
        assert httpx.get(f"{url}{path}").status_code == 200


def test_of_requests_that_had_not_begun_to_stream_none_is_lost(cluster: launch.Server) -> None:
    """One worker is killed, another one is drained and replaced, under load."""
    story = asyncio.run(fire(cluster))
    outcomes = story.outcomes
    assert len(outcomes) >= LEAST
    lost = [each for each in outcomes if not (each.whole or each.begun)]
    assert not lost, lost[:5]
    broken = [each for each in outcomes if not each.whole]
    assert len(broken) <= CLIENTS
    assert all(each.sent_at <= story.killed_at for each in broken), "the drain broke some"
    assert story.replaced


async def fire(cluster: launch.Server) -> Story:
    """Ask until everything has happened, and at least `LEAST` times."""
    story, numbers = Story([]), iter(range(100_000))
    async with cluster.async_client() as client, contextlib.AsyncExitStack() as stack:
        happened = asyncio.create_task(operate(cluster, story, stack))

        async def ask_on() -> None:
            while not (happened.done() and len(story.outcomes) >= LEAST):
                story.outcomes.append(await ask(client, next(numbers)))

        await asyncio.gather(*(ask_on() for _ in range(CLIENTS)))
        await happened
    return story


async def ask(client: httpx.AsyncClient, number: int) -> Outcome:
    """One request; which endpoint and whether it streams goes by its number."""
    words = " ".join(random.Random(number).choices(VOCABULARY, k=200))
    path, body = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
        ("/v1/completions", {"prompt": words}),
        ("/generate", {"text": words, "sampling_params": {"max_new_tokens": 12}}),
    )[number % 3]
    body |= {"stream": number % 2 == 0, "kv_compression": {"rate": 8}}
    if path != "/generate":
        body |= {"model": "recall", "max_tokens": 12}
    text, sent_at = "", time.monotonic()
    async with client.stream("POST", path, json=body) as answer:
        with contextlib.suppress(httpx.HTTPError):
            async for part in answer.aiter_text():
                text += part
    well = answer.status_code == 200 and '"error"' not in text
    if body["stream"]:
        begun = answer.status_code == 200 and re.search(r"^data: (?!.*\"error\")", text, re.M)
        return Outcome(path, sent_at, answer.status_code, bool(begun), well and "[DONE]" in text)
    return Outcome(path, sent_at, answer.status_code, False, well and "kv_compression" in text)


async def operate(cluster: launch.Server, story: Story, stack: contextlib.AsyncExitStack) -> None:
    """Kill a worker, and drain and replace another one."""
    router, workers = parts(cluster)
    assert len(workers) == 3
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        await until(lambda: answered(story, 20))
        killed = await busiest(client, workers)
        story.killed_at = time.monotonic()
        launch.kill_group(killed.pid)
        workers.remove(killed)
        await until(lambda: answered(story, 60))
        drained = await busiest(client, workers)
        command, env, url = drained.cmdline(), drained.environ(), url_of(drained)
        await listed(client, router, url, wanted=False)
        drained.terminate()
        await until(lambda: ended(drained))
        replacement = subprocess.Popen(
            command, env=env, start_new_session=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(replacement.wait)
        stack.callback(launch.kill_group, replacement.pid)
        await until(lambda: serves(client, url))
        await listed(client, router, url, wanted=True)
        await until(lambda: has_answered(client, url))
        story.replaced = True


def parts(cluster: launch.Server) -> tuple[str, list[psutil.Process]]:
    """The router's URL, which its command line does not tell, and the workers."""
    children = psutil.Process(cluster.process.pid).children()
    workers = [each for each in children if "sglang.launch_server" in each.cmdline()]
    for child in children:
        for socket in child.net_connections("tcp") if child not in workers else ():
            url = f"http://127.0.0.1:{socket.laddr.port}"
            with contextlib.suppress(httpx.HTTPError):
                if socket.status == psutil.CONN_LISTEN and httpx.get(f"{url}/workers").is_success:
                    return url, workers
    raise AssertionError("no router")


def url_of(process: psutil.Process) -> str:
    words = process.cmdline()
    return f"http://127.0.0.1:{words[words.index('--port') + 1]}"


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 600) -> None:
    with anyio.fail_after(within_s):
        while not await condition():
            await asyncio.sleep(0.2)


async def answered(story: Story, count: int) -> bool:
    return len(story.outcomes) >= count


async def busiest(client: httpx.AsyncClient, workers: list[psutil.Process]) -> psutil.Process:
    """The worker that answers the most requests now, and at least one."""
    found: list[psutil.Process] = []

    async def one_is() -> bool:
        loads = [(await client.get(f"{url_of(each)}/get_load")).json()[0]["num_reqs"]
                 for each in workers]  # fmt: skip
        found[:] = [workers[loads.index(max(loads))]]
        return max(loads) > 0

    await until(one_is)
    return found[0]


async def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def serves(client: httpx.AsyncClient, url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get(f"{url}/health")).status_code == 200
    return False


async def has_answered(client: httpx.AsyncClient, url: str) -> bool:
    text = (await client.get(f"{url}/metrics/")).text
    counts = re.findall(r"^sglang[:_]num_requests_total(?:\{.*\})? (\S+)$", text, re.M)
    return any(float(count) >= 3 for count in counts)


async def listed(client: httpx.AsyncClient, router: str, worker: str, *, wanted: bool) -> None:
    """Put a worker on the router's list, or take it off, and wait until it is so."""

    async def on_the_list() -> dict[str, Any]:
        told = (await client.get(f"{router}/workers")).json()["workers"]
        return {each["url"]: each for each in told}

    if wanted:
        answer = await client.post(f"{router}/workers", json={"url": worker})
    else:
        answer = await client.delete(f"{router}/workers/{(await on_the_list())[worker]['id']}")
    assert answer.is_success, answer.text

    async def so() -> bool:
        entry = (await on_the_list()).get(worker)
        return entry is not None and entry["is_healthy"] if wanted else entry is None

    await until(so)
