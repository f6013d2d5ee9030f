"""What each key has used: requests and tokens per minute, and requests at once."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter

from kvc_server.errors import RETRY_AFTER_S, ApiError
from kvc_server.tenants import Tenant

_REQUESTS, _TOKENS = "requests", "tokens"


@dataclasses.dataclass
class Reservation:
    """Tokens that a request may use, of one minute of a key's.

    Attributes
    ----------
    ends : when that minute ends, in `time.time()`; what is not used is given back only before.
    """

    tenant: Tenant
    tokens: int
    ends: float


class Quotas:
    """Counts what keys use. All in one thread, and nothing here waits."""

    def __init__(self) -> None:
        self._storage = MemoryStorage()
        self._requests = MovingWindowRateLimiter(self._storage)
        self._tokens = FixedWindowRateLimiter(self._storage)
        self._running: Counter[str] = Counter()

    @contextlib.contextmanager
    def running(self, tenant: Tenant) -> Iterator[None]:
        """Run one request inside. Raises ApiError 429 when the key has had its share."""
        name, most = tenant.name, tenant.concurrency
        if most is not None and self._running[name] >= most:
            raise _too_many(f"this key has {most} requests running, its most", RETRY_AFTER_S)
        if tenant.requests_per_minute is not None:
            item = RateLimitItemPerMinute(tenant.requests_per_minute)
            if not self._requests.hit(item, _REQUESTS, name):
                reset = self._requests.get_window_stats(item, _REQUESTS, name).reset_time
                told = f"this key may send {tenant.requests_per_minute} requests per minute"
                raise _too_many(told, reset - time.time())
        self._running[name] += 1
        try:
            yield
        finally:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]

    def reserve(self, tenant: Tenant, tokens: int) -> Reservation:
        """Take `tokens`, as many as a request may use, from the key's minute.

        The minute begins with the first request after the last one ended.

        Raises
        ------
        ApiError : 429 when the minute has not so many left; 400 when no minute has.
        """
        most = tenant.tokens_per_minute
        assert most is not None
        item = RateLimitItemPerMinute(most)
        if tokens > most:
            told = f"this request may take {tokens} tokens, and its key has {most} per minute"
            raise ApiError(400, f"{told}: limit its answer", code="request_too_large")
        if not self._tokens.test(item, _TOKENS, tenant.name, cost=tokens):
            reset = self._tokens.get_window_stats(item, _TOKENS, tenant.name).reset_time
            told = f"this key may use {most} tokens per minute"
            raise _too_many(f"{told}, and this request may take {tokens}", reset - time.time())
        self._tokens.hit(item, _TOKENS, tenant.name, cost=tokens)
        ends = self._tokens.get_window_stats(item, _TOKENS, tenant.name).reset_time
        return Reservation(tenant, tokens, ends)

    def settle(self, reservation: Reservation, used: int) -> None:
        """Give back what of a reservation was not used."""
        tenant, left = reservation.tenant, reservation.tokens - used
        if left > 0 and tenant.tokens_per_minute is not None and time.time() < reservation.ends:
            item = RateLimitItemPerMinute(tenant.tokens_per_minute)
            self._storage.decr(item.key_for(_TOKENS, tenant.name), left)


def _too_many(told: str, wait_s: float) -> ApiError:
    headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
    return ApiError(429, f"{told}; try again later", code="rate_limit_exceeded", headers=headers)
