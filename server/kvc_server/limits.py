"""What a client may cost before its request begins, and reading a body within that."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from kvc_server.errors import ApiError

MIB = 1 << 20
_DISCARD_S = 1.0
_CLOSE = {"Connection": "close"}  # the rest of the body is not read


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one gateway.

    Attributes
    ----------
    max_body : bytes of a request's body.
    max_in_flight : requests that are answered at once.
    header_timeout : seconds from a connection's begin, or an answer's end, to the last header.
    body_timeout : seconds in which the body has to be there.
    drain_timeout : seconds that a stop waits for requests in flight.
    """

    max_body: int = 32 * MIB
    max_in_flight: int = 1024
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    drain_timeout: float = 60.0


async def discard_body(receive: Receive) -> None:
    """Read what nobody needs, if it comes soon and is not much.

    A connection that is closed with a part of the request unread is reset, and its client may
    never see the answer.
    """
    size = 0
    with anyio.move_on_after(_DISCARD_S):
        while size <= MIB:
            message = await receive()
            size += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return


async def read_body(headers: Mapping[str, str], receive: Receive, limits: Limits) -> bytearray:
    """A request's body. Raises ApiError 413, 408 or 415, ClientDisconnect if the client leaves."""
    encoding = headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        told = f"send the body as plain JSON; Content-Encoding {encoding} is not read"
        raise ApiError(415, told, headers=_CLOSE)
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length) > limits.max_body:
        raise _too_large(limits)
    body = bytearray()
    with anyio.move_on_after(limits.body_timeout):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > limits.max_body:
                raise _too_large(limits)
            if not message.get("more_body", False):
                return body
    told = f"the body was not there after {limits.body_timeout:g} s"
    raise ApiError(408, told, code="body_timeout", headers=_CLOSE)


def _too_large(limits: Limits) -> ApiError:
    told = f"the body is larger than this server's limit of {limits.max_body} bytes"
    return ApiError(413, told, code="body_too_large", headers=_CLOSE)
