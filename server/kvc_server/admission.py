"""Who is let in: no more requests at once than the limit, and none while the gateway drains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import anyio

from kvc_server.errors import RETRY_AFTER_S, ApiError

_POLL_S = 0.05


class Admission:
    """Counts the requests in flight, and ends them.

    Attributes
    ----------
    draining : no request is let in any more.
    """

    def __init__(self, max_in_flight: int):
        self._max = max_in_flight
        self._scopes: set[anyio.CancelScope] = set()
        self.draining = False

    @property
    def in_flight(self) -> int:
        return len(self._scopes)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[anyio.CancelScope]:
        """Run one request inside; its scope is cancelled when the gateway cannot wait for it.

        Raises
        ------
        ApiError : 503 while draining, 429 when there are too many.
        """
        if (refusal := self.refusal()) is not None:
            raise refusal
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def refusal(self) -> ApiError | None:
        """Why a request would not be admitted now; None if it would."""
        if self.draining:
            return shutting_down()
        if self.in_flight >= self._max:
            return ApiError(
                429,
                f"this server answers {self._max} requests at once; try again in a few seconds",
                code="too_many_requests",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        return None

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        while self._scopes:
            await anyio.sleep(_POLL_S)

    def cut(self) -> None:
        """End every request in flight; each tells its client."""
        for scope in list(self._scopes):
            scope.cancel()


def shutting_down() -> ApiError:
    """503: this gateway ends; another one, or the next, should be asked."""
    return ApiError(
        503,
        "the gateway is shutting down; send the request again",
        code="shutting_down",
        headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
    )
