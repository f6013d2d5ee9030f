"""How the gateway connects to its worker: every request has a connection of its own."""

from __future__ import annotations

import ssl

import httpx

_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=0)


class OneEach(httpx.AsyncBaseTransport):
    """Opens a connection for every request, which is closed with the response.

    A kept one may be closing at the worker's end just when the next request is written, and a
    generation cannot be sent again without harm. So there is nothing to pool, and httpx's pool
    looks at all its connections whenever a request begins and ends: milliseconds, with hundreds.
    """

    def __init__(self) -> None:
        self._tls: ssl.SSLContext = httpx.create_ssl_context(trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        transport = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=_ONE)
        return await transport.handle_async_request(request)
