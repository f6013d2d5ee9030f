"""Every request gets an id, a line of the access log, and is counted."""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvc_server.metrics import Metrics
from kvc_server.record import Record
from kvc_server.routes import endpoint_name
from kvc_server.settings import SettingsError

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
#: Of a scope: the `Record` of the request.
RECORD = "kvc_record"
_ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})

WriteLine = Callable[[str], object]


class ObservingMiddleware:
    """Counts requests and their times, gives each an id, and writes the access log."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, write: WriteLine | None = None):
        self.app = app
        self.metrics = metrics
        self.write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        record = Record(_take_id(scope), method, endpoint_name(scope["path"]))
        scope[RECORD] = record
        begin = time.perf_counter()
        last: float | None = None
        told = False

        def end() -> None:
            nonlocal told
            if not told:
                told = True
                self.metrics.in_flight.labels(record.endpoint).dec()
                record.seconds = time.perf_counter() - begin
                self._tell(record)

        async def watched(message: Message) -> None:
            nonlocal last
            if message["type"] == "http.response.start":
                record.status = str(message["status"])
                record.stream = _is_stream(message["headers"])
                kept = [pair for pair in message["headers"] if pair[0].lower() != _ID_HEADER]
                message["headers"] = [*kept, (_ID_HEADER, record.id.encode())]
            elif record.stream and message.get("body"):
                now = time.perf_counter()
                if last is None:
                    record.first_s = now - begin
                else:
                    self.metrics.inter_token.labels(record.endpoint).observe(now - last)
                last = now
            if message["type"] == "http.response.body" and not message.get("more_body"):
                record.complete = True
                end()  # the next request of this client may ask what was counted
            await send(message)

        self.metrics.in_flight.labels(record.endpoint).inc()
        try:
            await self.app(scope, receive, watched)
        except Exception:
            record.status = "500"
            raise
        finally:
            end()

    def _tell(self, record: Record) -> None:
        record.held.close()
        self.metrics.observe(record)
        if self.write is not None:
            try:
                self.write(record.to_json())
            except OSError as error:
                log.error("the access log cannot be written: %s", error)


def access_log(target: str) -> WriteLine:
    """Writes lines to a file, or to stdout for "-". Raises SettingsError."""
    try:
        stream = sys.stdout if target == "-" else Path(target).open("a", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise SettingsError(f"--access-log: {error}") from None

    def write(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    return write


_ID_HEADER = REQUEST_ID.encode()


def _take_id(scope: Scope) -> str:
    """The client's id if it is one, else a new one; the scope's headers have it from here on."""
    given = [value for name, value in scope["headers"] if name == _ID_HEADER]
    fine = len(given) == 1 and _ID.fullmatch(given[0])
    taken = given[0] if fine else f"req_{secrets.token_hex(16)}".encode()
    others = [pair for pair in scope["headers"] if pair[0] != _ID_HEADER]
    scope["headers"] = [*others, (_ID_HEADER, taken)]
    return taken.decode()


def _is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )
