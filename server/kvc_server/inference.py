"""A request that generates: let in, read, its knob put where the worker looks, and forwarded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from anyio import to_process
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvc_server import knob
from kvc_server.admission import Admission, shutting_down
from kvc_server.errors import ApiError
from kvc_server.limits import read_body
from kvc_server.proxy import Forward
from kvc_server.settings import Settings

#: Larger bodies are parsed in a process of their own: in this one nobody else would be served
#: meanwhile, in whichever thread. Below, that takes less than the way there.
BIG_BODY_BYTES = 256 * 1024

MakeForward = Callable[[Scope, str, bytes], Forward]


class Inference:
    """The endpoint of one path, an ASGI application.

    Parameters
    ----------
    path : the route's path, also the worker's.
    forward : makes the response that relays the worker's, from scope, path and body.
    """

    def __init__(self, path: str, settings: Settings, admission: Admission, forward: MakeForward):
        self._path = path
        self._settings = settings
        self._admission = admission
        self._forward = forward

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        forward: Forward | None = None
        with self._admission.admitted() as cut:
            content = await self._content(Headers(scope=scope), receive)
            forward = self._forward(scope, self._path, content)
            await forward(scope, receive, send)
        if cut.cancelled_caught:
            if forward is None or not forward.started:
                raise shutting_down()
            await forward.end_with(shutting_down(), send)

    async def _content(self, headers: Headers, receive: Receive) -> bytes:
        body = await read_body(headers, receive, self._settings.limits)
        header = headers.getlist(knob.HEADER)
        native = self._path == "/generate"
        if len(body) <= BIG_BODY_BYTES:
            return place_bytes(body, header, native, self._settings)
        return await to_process.run_sync(
            place_bytes, body, header, native, self._settings, cancellable=True
        )


def place_bytes(
    body: bytes | bytearray, header: list[str], native: bool, settings: Settings
) -> bytes:
    """`knob.place` from JSON text to JSON text."""
    placed = knob.place(json_object(body), header, native=native, settings=settings)
    return json.dumps(placed).encode()


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """The object that a body is. Raises ApiError 400."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return content
