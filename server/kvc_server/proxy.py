"""Forward one request to the worker and its answer back, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

import anyio
import httpx
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvc_server.errors import ApiError, from_transport, from_worker, from_worker_json
from kvc_server.events import (
    ResultScanner,
    Rewriter,
    amended_body,
    error_line,
    results,
    stream_status,
)
from kvc_server.metrics import Metrics
from kvc_server.record import Record
from kvc_server.reports import Reports
from sgl_kvc.spec import KNOB_HEADER, NAMESPACE_HEADER, routed

_LAST_EVENT_S = 1.0
#: What SGLang's router says in a stream of which the worker has sent nothing but its head.
_ROUTER_LOST = "Stream error: "
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"host", b"content-length", b"accept-encoding", b"expect", b"x-kv-compression-rate",
    *(form.encode() for name in (KNOB_HEADER, NAMESPACE_HEADER) for form in (name, routed(name))),
}  # fmt: skip
_KEYS = frozenset({b"authorization", b"x-api-key"})
#: Far more than any parameter of a query needs; httpx and servers have limits of their own.
MAX_QUERY_BYTES = 16384
_TARGET = re.compile(rb"[\x21-\x7e]*")  # what RFC 9112 allows, and h11 sends

Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")


def request_headers(
    raw: Iterable[tuple[bytes, bytes]], key: str | None = None, *, private: bool = False
) -> Headers:
    """The client's headers as the worker should see them; no compression of the answer.

    Parameters
    ----------
    key : the worker's; the client's own is then not for the worker.
    private : the client's key is ours, not the worker's.
    """
    dropped = _NOT_FORWARDED if key is None and not private else _NOT_FORWARDED | _KEYS
    kept = [(name, value) for name, value in raw if name.lower() not in dropped]
    told = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    return [*kept, *told, (b"accept-encoding", b"identity")]


def response_headers(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The worker's headers as the client should see them; our server adds date and framing."""
    dropped = _HOP_BY_HOP | {b"content-length", b"date", b"server"}
    return [(name.lower(), value) for name, value in raw if name.lower() not in dropped]


def upstream_request(
    client: httpx.AsyncClient,
    method: str,
    base: str,
    path: str,
    query: bytes,
    headers: Headers,
    content: bytes | None,
) -> httpx.Request:
    """A request to the worker at `base` for `path`, which is the route's and not the client's.

    `query` goes along byte for byte: httpx would quote it again, and cut it at a ``#``.

    Raises
    ------
    ApiError : 414 or 400 for a query that cannot be sent.
    """
    if len(query) > MAX_QUERY_BYTES:
        limit = f"the query is longer than {MAX_QUERY_BYTES} bytes"
        raise ApiError(414, f"{limit}; what is long belongs into the body", code="query_too_long")
    if not _TARGET.fullmatch(query):
        raise ApiError(400, "the query must be percent-encoded ASCII", code="invalid_query")
    url = httpx.URL(f"{base}{path}")
    target = url.raw_path + (b"?" + query if query else b"")
    return client.build_request(
        method, url, headers=headers, content=content, extensions={"target": target}
    )


class Forward(Response):
    """An ASGI response that sends `request` to the worker and relays what comes back.

    The request lives as long as its client: when the client leaves, waiting or streaming, the
    connection to the worker is closed, so that the engine aborts.

    Raises (before anything is sent): ApiError for an error the worker answered,
    httpx.HTTPError for one it did not. After that an error becomes the stream's last event.

    Attributes
    ----------
    started : the status has been sent.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        request: httpx.Request,
        metrics: Metrics,
        record: Record,
        reports: Reports | None = None,
    ):
        super().__init__()
        self._client = client
        self._request = request
        self._metrics = metrics
        self._record = record
        self._reports = reports
        self._sent = b"\n\n"  # the end of what was
        self.started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await while_connected(receive, self._relay(send))

    async def end_with(self, error: ApiError, send: Send) -> None:
        """Make `error` the last event of a stream that has begun, unless its client is stuck."""
        self._metrics.broken_streams.labels(self._record.endpoint).inc()
        gap = b"" if self._sent.endswith(b"\n\n") else b"\n\n"
        with anyio.move_on_after(_LAST_EVENT_S):
            event = gap + error.to_event()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _relay(self, send: Send) -> None:
        """Once; twice where SGLang's router lost the worker before the stream had begun."""
        try:
            await self._relay_once(send)
        except ApiError as error:
            if self.started or not error.message.startswith(_ROUTER_LOST):
                raise
            await self._relay_once(send)

    async def _relay_once(self, send: Send) -> None:
        worker = await self._client.send(self._request, stream=True)
        try:
            if worker.headers.get("content-type", "").startswith("text/event-stream"):
                await self._relay_stream(worker, send)
            else:
                await self._relay_body(worker, send)
        finally:
            await worker.aclose()

    async def _relay_body(self, worker: httpx.Response, send: Send) -> None:
        body = b"".join([chunk async for chunk in worker.aiter_raw()])
        if worker.status_code >= 400:
            raise from_worker(worker.status_code, body, worker.headers)
        if self._reports is not None:
            body = amended_body(body, self._reports)
        length = (b"content-length", str(len(body)).encode())
        await self._start(worker, send, length)
        self._note(results(body))
        await send({"type": "http.response.body", "body": body})

    async def _relay_stream(self, worker: httpx.Response, send: Send) -> None:
        chunks = worker.aiter_raw()
        chunk = await _first_line(chunks)
        if (line := chunk.partition(b"\n")[0]) and (content := error_line(line)):
            status = stream_status(content)
            raise from_worker_json(status, content, worker.headers)
        if worker.status_code >= 400:
            rest = [part async for part in chunks]
            body = b"".join([chunk, *rest])
            raise from_worker(worker.status_code, body, worker.headers)
        await self._start(worker, send)
        scanner, lines = ResultScanner(), Rewriter(self._reports)
        try:
            while chunk:
                if text := lines.feed(chunk):
                    scanner.feed(text)
                    await self._send_on(text, send)
                await asyncio.sleep(0)  # let others run, and a disconnect be noticed
                chunk = await anext(chunks, b"")
            await self._send_on(lines.rest(), send)
            self._note(scanner.results())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.HTTPError as lost:
            await self._send_on(lines.rest(), send)
            self._note(scanner.results())
            await self.end_with(from_transport(lost), send)

    async def _start(self, worker: httpx.Response, send: Send, *more: tuple[bytes, bytes]) -> None:
        headers = [*response_headers(worker.headers.raw), *more]
        self.started = True
        await send(
            {"type": "http.response.start", "status": worker.status_code, "headers": headers}
        )

    def _note(self, found: list[Any]) -> None:
        self._record.results = found
        if self._reports is not None:
            self._record.knob_lost = self._reports.lost is not None

    async def _send_on(self, text: bytes, send: Send) -> None:
        self._sent = text[-2:] or self._sent
        await send({"type": "http.response.body", "body": text, "more_body": True})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, unless the client disconnects: then it is cancelled.

    Raises
    ------
    ClientDisconnect
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
        gone.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task, gone})
    if task.cancelled():
        raise ClientDisconnect
    return task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_line(chunks: AsyncIterator[bytes]) -> bytes:
    """Chunks up to and with the one that completes the first line."""
    head = b""
    async for chunk in chunks:
        head += chunk
        if b"\n" in chunk:
            break
    return head
