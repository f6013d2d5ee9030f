"""The worker behind the gateway, as the rest of it sees it; and one that somebody else runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Protocol

import httpx

from kvc_server.errors import worker_down
from kvc_server.probe import Probe, Watch
from sgl_kvc.spec import WORKER_KEYS

LOOK_INTERVAL_S = 0.1


class WorkerFailed(Exception):
    """The worker was never ready; starting it again would not help."""


class Worker(Protocol):
    """What the rest of the gateway needs to know of a worker."""

    @property
    def ready(self) -> bool:
        """Whether the worker serves, by the last probe: known at once."""
        ...

    @property
    def probe_age(self) -> float:
        """Seconds since the worker last answered a probe."""
        ...

    def url(self) -> str:
        """Base URL without a trailing slash. Raises ApiError 503 when there is nobody."""
        ...

    @property
    def key(self) -> str | None:
        """Its API key, for the Authorization of every request that is sent there."""
        ...

    @property
    def admin_key(self) -> str | None:
        """The key for what only its operator may do; `key` if it has no other."""
        ...

    async def start(self) -> None:
        """Begin to bring the worker up; returns at once."""
        ...

    async def until_ready(self) -> None:
        """Wait for the first readiness. Raises WorkerFailed when it cannot come."""
        ...

    async def stop(self) -> None:
        """End what `start` began."""
        ...


class RemoteWorker:
    """A worker or router that somebody else runs."""

    def __init__(self, url: str, client: httpx.AsyncClient, watch: Watch):
        self._url = url.rstrip("/")
        # empty is none, as for the worker
        self.key = os.environ.get(WORKER_KEYS["api_key"]) or None
        self.admin_key = os.environ.get(WORKER_KEYS["admin_api_key"]) or self.key
        self._probe = Probe(client, self._url, watch)
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self._probe.ready

    @property
    def probe_age(self) -> float:
        return self._probe.silent_s

    def url(self) -> str:
        if self._probe.hangs:
            raise worker_down("the worker does not answer")
        return self._url

    async def start(self) -> None:
        self._task = asyncio.create_task(self._probe.run())

    async def until_ready(self) -> None:
        while not self.ready:
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def stop(self) -> None:
        await ended(self._task)


async def ended(task: asyncio.Task[None] | None) -> None:
    """Cancel `task` and wait until it is over."""
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
