"""Forward one request to the worker and its answer back, byte for byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvc_server.errors import ApiError, from_transport, from_worker, from_worker_json
from kvc_server.metrics import Metrics
from sgl_kvc.spec import CUSTOM_PARAM

_RESULT_KEY = f'"{CUSTOM_PARAM}"'.encode()
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"host", b"content-length", b"accept-encoding", b"expect", b"x-kv-compression-rate",
}  # fmt: skip
#: Far more than any parameter of a query needs; httpx and servers have limits of their own.
MAX_QUERY_BYTES = 16384
_TARGET = re.compile(rb"[\x21-\x7e]*")  # what RFC 9112 allows, and h11 sends

Headers = list[tuple[bytes, bytes]]


def request_headers(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The client's headers as the worker should see them; no compression of the answer."""
    kept = [(name, value) for name, value in raw if name.lower() not in _NOT_FORWARDED]
    return [*kept, (b"accept-encoding", b"identity")]


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
    """

    def __init__(
        self, client: httpx.AsyncClient, request: httpx.Request, metrics: Metrics, endpoint: str
    ):
        super().__init__()
        self._client = client
        self._request = request
        self._metrics = metrics
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._relay(send))

    async def _relay(self, send: Send) -> None:
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
            raise from_worker(worker.status_code, body)
        headers = response_headers(worker.headers.raw)
        headers.append((b"content-length", str(len(body)).encode()))
        await send(
            {"type": "http.response.start", "status": worker.status_code, "headers": headers}
        )
        await send({"type": "http.response.body", "body": body})
        for result in results(body):
            self._metrics.observe_result(result)

    async def _relay_stream(self, worker: httpx.Response, send: Send) -> None:
        chunks = worker.aiter_raw()
        chunk = await _first_line(chunks)
        if error := _stream_error(chunk):
            raise error
        if worker.status_code >= 400:
            rest = [part async for part in chunks]
            raise from_worker(worker.status_code, b"".join([chunk, *rest]))
        headers = response_headers(worker.headers.raw)
        await send(
            {"type": "http.response.start", "status": worker.status_code, "headers": headers}
        )
        scanner = ResultScanner()
        try:
            while chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                scanner.feed(chunk)
                await asyncio.sleep(0)  # let others run, and a disconnect be noticed
                chunk = await anext(chunks, b"")
        except httpx.HTTPError as lost:
            self._metrics.broken_streams.labels(self._endpoint).inc()
            gap = b"" if chunk.endswith(b"\n\n") else b"\n\n"
            event = gap + from_transport(lost).to_event()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        for result in scanner.results():
            self._metrics.observe_result(result)


class ResultScanner:
    """Finds the `kv_compression` objects in a stream of events, without holding it up."""

    def __init__(self) -> None:
        self._by_index: dict[str, Any] = {}
        self._line = b""

    def feed(self, chunk: bytes) -> None:
        """Look at the lines that `chunk` completes; only those with the key are parsed."""
        lines = self._line + chunk
        cut = lines.rfind(b"\n") + 1
        self._line = lines[cut:]
        if _RESULT_KEY not in lines[:cut]:
            return
        for line in lines[:cut].split(b"\n"):
            for event in _with_result(line.removeprefix(b"data:")):
                self._by_index[str(event.get("index"))] = event[CUSTOM_PARAM]

    def results(self) -> list[Any]:
        """The last object of each request: of the only one, or of each of a batch."""
        return list(self._by_index.values())


def results(body: bytes) -> list[Any]:
    """The `kv_compression` objects of a JSON body: of the object, or of each of a batch."""
    return [item[CUSTOM_PARAM] for item in _with_result(body)]


def _with_result(text: bytes) -> list[dict[str, Any]]:
    if _RESULT_KEY not in text:
        return []
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return []
    items = content if isinstance(content, list) else [content]
    return [item for item in items if isinstance(item, dict) and CUSTOM_PARAM in item]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it is done, or cancel it when the client disconnects."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
        gone.cancel()
        await asyncio.wait({task, gone})
    if not task.cancelled():
        task.result()


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


def _stream_error(head: bytes) -> ApiError | None:
    """The error that a stream begins with: SGLang may answer 200 and then only say why not."""
    line = head.split(b"\n", 1)[0].removeprefix(b"data:").strip()
    if not line.startswith(b'{"error"'):
        return None
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    code = content["error"].get("code") if isinstance(content["error"], dict) else None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return from_worker_json(status, content)
