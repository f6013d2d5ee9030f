"""A gateway in front of a worker that says what a test wants, both on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import uvicorn
from kvc_server.app import create_app
from kvc_server.limits import Limits
from kvc_server.probe import AGENT
from kvc_server.serving import Server
from kvc_server.settings import Settings
from prometheus_client.parser import text_string_to_metric_families

#: In an answer: close the connection here, or say nothing more until the other side closes it.
DROP, HANG = object(), object()
#: Seconds for what has to happen at some time; a shared machine can stand still for some.
PATIENCE = 120.0


class StubWorker:
    """Answers all but probes with `parts`, sent one by one, and remembers what it was sent.

    Attributes
    ----------
    parts : bytes, seconds or an event to wait for, DROP or HANG.
    head, body : the last request's, as they came; header lines in order.
    later : parts of the answers to the requests after the next one.
    answered : how many requests, those by path not counted.
    by_path : whole JSON bodies that these paths answer, whatever `parts` are.
    closed : set when the connection of the last request is closed by the other side.
    """

    def __init__(self) -> None:
        self.parts: list[object] = []
        self.later: list[list[object]] = []
        self.answered = 0
        self.by_path: dict[str, bytes] = {}
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
            if f"User-Agent: {AGENT}".encode() in lines:  # from the gateway itself, at any time
                writer.write(head(200, "Content-Length: 0"))
                writer.close()
                return
            if (told := self.by_path.get(lines[0].split()[1].decode())) is not None:
                writer.write(head(200, f"Content-Length: {len(told)}") + told)
                writer.close()
                return
            self.head, self.closed = lines, asyncio.Event()
            self.body = await reader.readexactly(int(self.header("content-length") or 0))
            parts, self.answered = self.parts, self.answered + 1
            self.parts = self.later.pop(0) if self.later else parts
            for part in parts:
                if part is HANG or part is DROP:
                    break
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                elif isinstance(part, asyncio.Event):
                    await part.wait()
                else:
                    await asyncio.sleep(float(str(part)))
            if DROP not in parts:
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


async def send_raw(client: httpx.AsyncClient, request: bytes) -> bytes:
    """All that a server answers to `request`, sent as it is; httpx would mend or refuse it."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


@contextlib.asynccontextmanager
async def stubbed(**options: Any) -> AsyncIterator[tuple[StubWorker, httpx.AsyncClient]]:
    """A stub, and a client of the gateway in front of it, which has `options` as its settings."""
    worker = StubWorker()
    async with await asyncio.start_server(worker.serve, "127.0.0.1", 0, backlog=1024) as listening:
        worker.port = listening.sockets[0].getsockname()[1]
        options = {"limits": Limits(drain_timeout=1)} | options
        settings = Settings(worker_url=f"http://127.0.0.1:{worker.port}", **options)
        app = create_app(settings)
        config = uvicorn.Config(app, port=0, log_level="error")
        server = Server(config, app.state.admission, settings.limits)
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            yield worker, client
        server.should_exit = True
        await running


Scenario = Callable[[StubWorker, httpx.AsyncClient], Awaitable[None]]


def play(scenario: Scenario, **options: Any) -> None:
    """Run `scenario` against a gateway and a stub worker."""

    async def stage() -> None:
        async with stubbed(**options) as (worker, client):
            await asyncio.wait_for(scenario(worker, client), PATIENCE)

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
