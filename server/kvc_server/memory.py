"""Who gets blocks of the KV pool: requests are let in while they fit, and wait in order."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Hashable

import anyio

from kvc_server.errors import RETRY_AFTER_S, ApiError
from kvc_server.footprint import Asked, Footprint


@dataclasses.dataclass(frozen=True)
class Pool:
    """A worker's KV pool.

    Attributes
    ----------
    blocks : for requests, without those of documents that are kept.
    """

    blocks: int
    page_size: int


@dataclasses.dataclass(frozen=True)
class Waiting:
    """How requests wait for room.

    Attributes
    ----------
    timeout : seconds, at most.
    most : requests that wait at once.
    """

    timeout: float = 30.0
    most: int = 256


@dataclasses.dataclass(eq=False)
class Claim:
    """What one request was given.

    Attributes
    ----------
    rate : to which its rate was raised; None leaves it as it is.
    """

    footprint: Footprint
    rate: float | None = None


class Memory:
    """Blocks of one worker's pool, predicted for the requests that run.

    A request is let in where what all hold at their ends fits, and its prefill beside what the
    others hold. Who does not fit waits, the highest priority first and then in order; nobody
    overtakes, so a large request comes to its turn. One that is alone is always let in: what it
    is too large for is the worker's to say.
    """

    def __init__(self, limits: Waiting):
        self._limits = limits
        self._claims: set[Claim] = set()
        self._own = 0
        self._readers: Counter[Hashable] = Counter()
        self._shared = 0
        self._waiting: list[_Waiter] = []
        self._numbers = itertools.count()

    @property
    def held(self) -> int:
        """Blocks that admitted requests hold, or will."""
        return self._own + self._shared

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    @property
    def admitted(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._claims)

    async def admit(self, asked: Asked, pool: Pool) -> Claim:
        """Wait for room and take it, until `release`. Raises ApiError 429.

        Who is cancelled, whenever that is, holds nothing.
        """
        if not self._waiting and (claim := self._let_in(asked, pool)) is not None:
            return claim
        if len(self._waiting) >= self._limits.most:
            raise _full(f"{self._limits.most} requests wait for room in the KV pool already")
        mine = _Waiter(-asked.priority, next(self._numbers), asked, pool)
        bisect.insort(self._waiting, mine)
        try:
            with anyio.move_on_after(self._limits.timeout):
                await mine.turn.wait()
        except BaseException:
            if mine.claim is not None:  # let in, and cancelled before it could know
                self.release(mine.claim)
            raise
        finally:
            if mine.claim is None:
                self._waiting.remove(mine)
                self._let_in_waiting()
        if mine.claim is None:
            told = f"the KV pool had no room for this request for {self._limits.timeout:g} s"
            raise _full(told)
        return mine.claim

    def release(self, claim: Claim) -> None:
        """Give back what a request held, and let in who waits for it."""
        self._claims.remove(claim)
        self._own -= claim.footprint.own
        for what, size in claim.footprint.shared.items():
            self._readers[what] -= 1
            if not self._readers[what]:
                del self._readers[what]
                self._shared -= size
        self._let_in_waiting()

    def _fits(self, footprint: Footprint, pool: Pool, more: int = 0) -> bool:
        """Whether there is room for it, and for so many `more` like it."""
        new = sum(size for what, size in footprint.shared.items() if what not in self._readers)
        need = self.held + (1 + more) * (footprint.own + new) + footprint.prefill
        return need <= pool.blocks or not (self._claims or more)

    def _choice(self, asked: Asked, pool: Pool) -> Claim | None:
        """What it is given now: its own rate, or one that is raised; None if it has to wait.

        A prompt is prefilled uncompressed, so its rate helps those that come after it. It is
        raised until one more like it would have room.
        """
        page = pool.page_size
        own = Claim(asked.footprint(page))
        rates = asked.raised_rates(page)
        if rates and not self._fits(own.footprint, pool, more=1):
            first = bisect.bisect_left(
                rates[:-1], True, key=lambda rate: self._fits(asked.footprint(page, rate), pool, 1)
            )
            raised = Claim(asked.footprint(page, rates[first]), rates[first])
            if self._fits(raised.footprint, pool):
                return raised
        return own if self._fits(own.footprint, pool) else None

    def _let_in(self, asked: Asked, pool: Pool) -> Claim | None:
        """A claim, if there is one that fits now."""
        claim = self._choice(asked, pool)
        if claim is None:
            return None
        self._claims.add(claim)
        self._own += claim.footprint.own
        for what, size in claim.footprint.shared.items():
            if what not in self._readers:
                self._shared += size
            self._readers[what] += 1
        return claim

    def _let_in_waiting(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            first.claim = self._let_in(first.asked, first.pool)
            if first.claim is None:
                return
            del self._waiting[0]
            first.turn.set()


@dataclasses.dataclass(order=True)
class _Waiter:
    rank: int
    number: int
    asked: Asked = dataclasses.field(compare=False)
    pool: Pool = dataclasses.field(compare=False)
    turn: asyncio.Event = dataclasses.field(compare=False, default_factory=asyncio.Event)
    claim: Claim | None = dataclasses.field(compare=False, default=None)


def _full(why: str) -> ApiError:
    return ApiError(
        429,
        f"{why}; try again in a few seconds",
        code="kv_pool_full",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )
