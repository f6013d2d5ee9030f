"""uvicorn with what a server in front of users needs: a deadline for headers, and a drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import anyio
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvc_server.admission import Admission
from kvc_server.limits import Limits

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_WORDS_S = 5  # for what is cut, to reach its client


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request has no complete headers in time.

    uvicorn closes an idle kept connection, but not one that never sent a request, or a part.
    """

    def __init__(self, *args: Any, header_timeout: float, **options: Any):
        super().__init__(*args, **options)
        self._header_timeout = header_timeout
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """The clock runs from the connection's begin, or an answer's end, to the next headers."""
        begun = self.cycle is not None and not self.cycle.response_complete
        if begun and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif not begun and self._deadline is None:
            self._deadline = self.loop.call_later(self._header_timeout, self._too_late)

    def _too_late(self) -> None:
        self._deadline = None
        if self.transport is not None:
            self.transport.close()


class Server(uvicorn.Server):
    """A server that ends by itself, with status 0, when it is told to by a signal.

    First nobody is let in any more and readiness says so, while what is in flight goes on; after
    `limits.drain_timeout`, or a second signal, the rest is cut and told; then it stops listening.
    """

    def __init__(self, config: uvicorn.Config, admission: Admission, limits: Limits):
        config.http = functools.partial(  # type: ignore[assignment]
            DeadlineProtocol, header_timeout=limits.header_timeout
        )
        config.timeout_graceful_shutdown = _LAST_WORDS_S
        super().__init__(config)
        self._admission = admission
        self._drain_timeout = limits.drain_timeout
        self._hurry = anyio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own raises the signal again at the end, so that the exit status is not 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._hurry.set()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._admission.draining = True
        log.info("waiting for %d requests in flight", self._admission.in_flight)
        await self._settled(self._drain_timeout)
        if left := self._admission.in_flight:
            log.warning("cutting %d requests", left)
            self._admission.cut()
            self._hurry = anyio.Event()
            await self._settled(_LAST_WORDS_S)
        await super().shutdown(sockets)

    async def _settled(self, within_s: float) -> None:
        """Wait until nothing is in flight, for so long at most, and not after another signal."""
        with anyio.move_on_after(within_s):
            async with anyio.create_task_group() as group:
                for event in (self._admission.idle, self._hurry.wait):
                    group.start_soon(_then_cancel, event, group.cancel_scope)


async def _then_cancel(event: Any, scope: anyio.CancelScope) -> None:
    await event()
    scope.cancel()
