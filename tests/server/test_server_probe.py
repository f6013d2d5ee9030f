"""A worker is asked whether it serves; who was held up is not the worker."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import httpx
from kvc_server.probe import Probe, Watch

from tests.server.stub_worker import head

ANSWER_S = 0.1
WATCH = Watch(interval=0.01, engine_interval=0.01, timeout=0.4)


@contextlib.asynccontextmanager
async def probed(*, silent: bool = False) -> AsyncIterator[Probe]:
    """A running probe of a server that takes its time, or says nothing at all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await (reader.read() if silent else asyncio.sleep(ANSWER_S))
            writer.write(head(200, "Content-Length: 0"))
        writer.close()

    async with (
        await asyncio.start_server(serve, "127.0.0.1", 0) as listening,
        httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as client,
    ):
        port = listening.sockets[0].getsockname()[1]
        probe = Probe(client, f"http://127.0.0.1:{port}", WATCH)
        running = asyncio.create_task(probe.run())
        try:
            yield probe
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


def test_a_gateway_that_is_held_up_does_not_blame_the_worker() -> None:
    """Its answer is there by then, and so is the end of the time that it had."""

    async def scenario() -> None:
        async with probed() as probe:
            while not probe.ready:
                await asyncio.sleep(0.01)
            for _ in range(5):
                await asyncio.sleep(ANSWER_S / 2)
                time.sleep(2 * WATCH.timeout)
                for _ in range(10):
                    await asyncio.sleep(0)
                    assert not probe.hangs

    asyncio.run(scenario())


def test_a_worker_that_says_nothing_hangs() -> None:
    async def scenario() -> None:
        async with probed(silent=True) as probe:
            while not probe.hangs:
                await asyncio.sleep(0.01)
            assert probe.silent_s >= WATCH.timeout

    asyncio.run(asyncio.wait_for(scenario(), 60))
