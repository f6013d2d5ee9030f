"""A gateway in front of a worker that says what a test wants, both on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import uvicorn
from kvc_server.app import create_app
from kvc_server.settings import Settings
from prometheus_client.parser import text_string_to_metric_families

#: In an answer: close the connection here, or say nothing more until the other side closes it.
DROP, HANG = object(), object()


class StubWorker:
    """Answers every request with `parts`, sent one by one, and remembers what it was sent.

    Attributes
    ----------
    parts : bytes, seconds to wait, DROP or HANG.
    head, body : the last request's, as they came; header lines in order.
    closed : set when the connection of the last request is closed by the other side.
    """

    def __init__(self) -> None:
        self.parts: list[object] = []
        self.head: list[bytes] = []
        self.body = b""
        self.closed = asyncio.Event()
        self.port = 0

    def answer(self, *parts: object) -> None:
        """What to say from now on."""
        self.parts = list(parts)

    def says(self, body: bytes, status: int = 200, *headers: str, kind: str = "json") -> None:
        """Answer with a whole response of type ``application/<kind>``."""
        lines = [f"Content-Type: application/{kind}", f"Content-Length: {len(body)}", *headers]
        self.answer(head(status, *lines) + body)

    def streams(self, *parts: object, status: int = 200) -> None:
        """Answer with an event stream that ends when the connection does."""
        opening = head(status, "Content-Type: text/event-stream; charset=utf-8")
        self.answer(opening, *parts, DROP)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
            self.head, self.closed = lines, asyncio.Event()
            self.body = await reader.readexactly(int(self.header("content-length") or 0))
            for part in self.parts:
                if part is HANG or part is DROP:
                    break
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.sleep(float(str(part)))
            if DROP not in self.parts:
                await reader.read()
                self.closed.set()
            writer.close()

    def headers(self, name: str) -> list[str]:
        """Every value of one header of the last request."""
        pairs = (line.decode("latin-1").split(": ", 1) for line in self.head[1:])
        return [value for key, value in pairs if key.lower() == name]

    def header(self, name: str) -> str | None:
        """Its first value, None if it was not sent."""
        return next(iter(self.headers(name)), None)


def head(status: int, *lines: str) -> bytes:
    """The head of a response."""
    return "\r\n".join([f"HTTP/1.1 {status} Said", *lines, "", ""]).encode()


@contextlib.asynccontextmanager
async def stubbed(**settings: Any) -> AsyncIterator[tuple[StubWorker, httpx.AsyncClient]]:
    """A stub, and a client of the gateway in front of it, which has `settings`."""
    worker = StubWorker()
    async with await asyncio.start_server(worker.serve, "127.0.0.1", 0) as listening:
        worker.port = listening.sockets[0].getsockname()[1]
        app = create_app(Settings(worker_url=f"http://127.0.0.1:{worker.port}", **settings))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield worker, client
        server.should_exit = True
        await running


Scenario = Callable[[StubWorker, httpx.AsyncClient], Awaitable[None]]


def play(scenario: Scenario, **settings: Any) -> None:
    """Run `scenario` against a gateway and a stub worker."""

    async def stage() -> None:
        async with stubbed(**settings) as (worker, client):
            await asyncio.wait_for(scenario(worker, client), 30)

    asyncio.run(stage())


async def metrics(worker: StubWorker, client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """The gateway's own: (name, labels' values) to value."""
    worker.says(b"", 404)
    text = (await client.get("/metrics")).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
