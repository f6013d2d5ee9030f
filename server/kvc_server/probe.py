"""Does the worker serve? Asked again and again, so that the answer is there when it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time

import httpx

#: Answered by SGLang's HTTP server alone, however busy the engine is; any status will do.
LIVE_PATH = "/v1/models"
#: Goes through the engine. SGLang answers 503 when that says nothing for 20 s.
HEALTH_PATH = "/health"
HEALTH_TIMEOUT_S = 25.0
AGENT = "sgl-kvc-probe"
_UNHEALTHY_INTERVAL_S = 0.5
_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Watch:
    """How a worker is watched; all in seconds.

    Attributes
    ----------
    interval : between two probes of the HTTP server.
    engine_interval : between two of the engine; each may cost it a token.
    timeout : an HTTP server that does not answer for so long hangs: no request is sent there.
    hang_timeout : a worker of our own that hangs for so long is killed and started again.
    start_timeout : a worker of our own that is not ready after so long is given up.
    longest_backoff : between two starts, at most.
    """

    interval: float = 2.0
    engine_interval: float = 10.0
    timeout: float = 10.0
    hang_timeout: float = 30.0
    start_timeout: float = 1800.0
    longest_backoff: float = 30.0


class Probe:
    """What is known of the server at one URL.

    Attributes
    ----------
    hangs : its HTTP server did not answer the last time; False before it was ever asked.
    healthy : its engine answered the last time.
    answered : `time.monotonic()` of the HTTP server's last answer, or of the probe's making.
    """

    def __init__(self, client: httpx.AsyncClient, url: str, watch: Watch):
        self._client = client
        self._url = url
        self._watch = watch
        self.hangs = False
        self.healthy = False
        self.answered = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return self.healthy and not self.hangs

    @property
    def silent_s(self) -> float:
        """Seconds since the HTTP server's last answer."""
        return time.monotonic() - self.answered

    async def run(self) -> None:
        """Probe until cancelled. Never raises for the network."""
        await asyncio.gather(self._watch_server(), self._watch_engine())

    async def _watch_server(self) -> None:
        while True:
            answered = await self._ask(LIVE_PATH, self._watch.timeout) is not None
            self.hangs = not answered
            if answered:
                self.answered = time.monotonic()
            await asyncio.sleep(self._watch.interval)

    async def _watch_engine(self) -> None:
        while True:
            self.healthy = await self._ask(HEALTH_PATH, HEALTH_TIMEOUT_S) == 200
            pause = self._watch.engine_interval
            await asyncio.sleep(pause if self.healthy else min(pause, _UNHEALTHY_INTERVAL_S))

    async def _ask(self, path: str, timeout: float) -> int | None:
        """The status of one answer; None if there was none within `timeout` seconds.

        They are counted in steps: while we are held up ourselves answers wait to be read, and of
        such a time no more than one step counts.
        """
        asked = asyncio.create_task(self._status(path))
        try:
            for _ in range(_STEPS):
                done, _ = await asyncio.wait({asked}, timeout=timeout / _STEPS)
                if done:
                    return asked.result()
            return None
        finally:
            asked.cancel()

    async def _status(self, path: str) -> int | None:
        with contextlib.suppress(httpx.HTTPError):
            url = f"{self._url}{path}"
            answer = await self._client.get(url, timeout=None, headers={"User-Agent": AGENT})
            return answer.status_code
        return None
