"""A gateway that is told to stop, in a process of its own: who is served, who is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator

import httpx
import pytest
from kvc_server.launch import child_options, gateway, reserved_port

from tests.server.stub_worker import DROP, HANG, PATIENCE, StubWorker

CHAT = "/v1/chat/completions"
STREAMS = 64


@contextlib.asynccontextmanager
async def started(
    worker: StubWorker, *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """`sgl-kvc serve` before `worker`, ready; and a client of it."""
    async with await asyncio.start_server(worker.serve, "127.0.0.1", 0) as listening:
        worker.port = listening.sockets[0].getsockname()[1]
        worker.by_path["/v1/models"] = b'{"data": []}'  # the gateway asks once, at some time
        url = f"http://127.0.0.1:{worker.port}"
        with reserved_port() as port:
            command = gateway("--worker-url", url, *options).command(port)
            process = await asyncio.create_subprocess_exec(*command, **child_options())
            try:
                base = f"http://127.0.0.1:{port}"
                async with httpx.AsyncClient(base_url=base, timeout=PATIENCE) as client:
                    while not await answers(client, "/readiness"):
                        await asyncio.sleep(0.05)
                    yield process, client
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def answers(client: httpx.AsyncClient, path: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get(path)).status_code == 200
    return False


async def ask(client: httpx.AsyncClient, body: dict) -> httpx.Response:
    return await client.post(CHAT, json=body)


async def read(client: httpx.AsyncClient, begun: list[bytes]) -> bytes:
    """A whole stream, whose parts are put into `begun` as they come."""
    got = b""
    async with client.stream("POST", CHAT, json={"stream": True}) as answer:
        async for part in answer.aiter_raw():
            begun.append(part)
            got += part
    return got


def test_what_is_in_flight_is_served_to_its_end_and_nothing_new() -> None:
    async def scenario() -> None:
        worker = StubWorker()
        asked = asyncio.Event()
        worker.streams(b"data: 1\n\n", asked, b"data: [DONE]\n\n")
        async with started(worker) as (process, client):
            begun: list[bytes] = []
            streams = [asyncio.create_task(read(client, begun)) for _ in range(STREAMS)]
            while len(begun) < STREAMS:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            while await answers(client, "/readiness"):
                await asyncio.sleep(0.05)
            assert not await answers(client, "/health")
            assert await answers(client, "/live")
            refused = await ask(client, {})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert int(refused.headers["retry-after"]) > 0
            assert not any(stream.done() for stream in streams)
            asked.set()
            whole = b"data: 1\n\ndata: [DONE]\n\n"
            assert set(await asyncio.gather(*streams)) == {whole}
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 0

    asyncio.run(asyncio.wait_for(scenario(), 2 * PATIENCE))


@pytest.mark.parametrize("drain_timeout", ["0.5", "60"])
def test_what_is_cut_is_told_so(drain_timeout: str) -> None:
    """After the timeout, or at a second signal, for who stands at a terminal."""

    async def scenario() -> None:
        worker = StubWorker()
        async with started(worker, "--drain-timeout", drain_timeout) as (process, client):
            worker.streams(b"data: 1\n\ndata: ha", HANG)
            worker.parts.remove(DROP)
            stream = asyncio.create_task(ask(client, {"stream": True}))
            while not worker.body:
                await asyncio.sleep(0.01)
            worker.body = b""
            worker.answer(HANG)
            whole = asyncio.create_task(ask(client, {}))
            while not worker.body:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            process.send_signal(signal.SIGINT)
            if drain_timeout == "60":
                await asyncio.sleep(0.3)
                assert not whole.done()
                process.send_signal(signal.SIGINT)
            text = (await asyncio.wait_for(stream, PATIENCE)).content
            kept = b"data: 1\n\ndata: ha\n\ndata: "
            assert text.startswith(kept)
            assert json.loads(text.removeprefix(kept))["error"]["code"] == "shutting_down"
            answer = await whole
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 0

    asyncio.run(asyncio.wait_for(scenario(), 2 * PATIENCE))
