"""The worker behind the gateway: a URL, or an SGLang server that we start and keep alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from typing import Protocol

import httpx

from kvc_server.errors import ApiError, worker_down
from kvc_server.launch import reserved_port, sglang
from kvc_server.metrics import Metrics
from kvc_server.process import WorkerProcess
from kvc_server.settings import Settings

log = logging.getLogger(__name__)

WORKER_ARGS = (
    "--attention-backend", "kvc", "--radix-cache-backend", "kvc", "--page-size", "16",
    "--enable-metrics", "--enable-cache-report",
)  # fmt: skip
HEALTH_TIMEOUT_S = 25.0  # SGLang's own health check gives up after 20
PROBE_INTERVAL_S = 0.5
LONGEST_BACKOFF_S = 30.0
STABLE_AFTER_S = 60.0


class WorkerFailed(Exception):
    """The worker ended before it was ever ready; starting it again would not help."""


class Worker(Protocol):
    """What the rest of the gateway needs to know of a worker."""

    def url(self) -> str:
        """Base URL without a trailing slash. Raises ApiError 503 when there is nobody."""
        ...

    async def healthy(self) -> bool:
        """Whether the worker answers its health check now."""
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


async def answers_health(client: httpx.AsyncClient, url: str) -> bool:
    """True when the server at `url` says 200 to /health. Never raises for the network."""
    try:
        answer = await client.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200


class RemoteWorker:
    """A worker or router that somebody else runs."""

    def __init__(self, url: str, client: httpx.AsyncClient):
        self._url = url.rstrip("/")
        self._client = client

    def url(self) -> str:
        return self._url

    async def healthy(self) -> bool:
        return await answers_health(self._client, self._url)

    async def start(self) -> None:
        pass

    async def until_ready(self) -> None:
        while not await self.healthy():
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def stop(self) -> None:
        pass


class LocalWorker:
    """Starts one SGLang server on a loopback port, and starts it again when it ends.

    A worker that ends before it was ever ready is not started again: `until_ready` raises.
    Later ends are retried for ever, waiting longer each time up to LONGEST_BACKOFF_S.
    """

    def __init__(self, settings: Settings, client: httpx.AsyncClient, metrics: Metrics):
        assert settings.model_path is not None
        self._model_path = settings.model_path
        self._extra = settings.worker_args
        self._client = client
        self._metrics = metrics
        self._process: WorkerProcess | None = None
        self._serving_url: str | None = None
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def command(self, port: int) -> list[str]:
        """The command line of the worker; the user's arguments stand last and win."""
        return sglang(self._model_path, *WORKER_ARGS, *self._extra).command(port)

    def url(self) -> str:
        if self._serving_url is None or self._process is None or not self._process.running:
            raise worker_down("the worker is starting")
        return self._serving_url

    async def healthy(self) -> bool:
        try:
            return await answers_health(self._client, self.url())
        except ApiError:
            return False

    async def start(self) -> None:
        self._task = asyncio.create_task(self._supervise())

    async def until_ready(self) -> None:
        await asyncio.shield(self._first_ready)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task
        self._first_ready.cancel()

    async def _supervise(self) -> None:
        failures = 0
        try:
            while True:
                with reserved_port() as port:
                    lived = await self._run_once(port)
                failures = 0 if lived > STABLE_AFTER_S else failures + 1
                delay = 0.0 if failures <= 1 else min(2.0 ** (failures - 2), LONGEST_BACKOFF_S)
                log.warning("starting the worker again in %g s", delay)
                await asyncio.sleep(delay)
                self._metrics.worker_restarts.inc()
        except Exception as error:
            if self._first_ready.done():
                log.exception("the worker's supervisor stopped")
            else:
                self._first_ready.set_exception(error)

    async def _run_once(self, port: int) -> float:
        """One life of the worker; seconds for which it served. Leaves no process behind."""
        url = f"http://127.0.0.1:{port}"
        self._process = process = await WorkerProcess.start(self.command(port))
        try:
            end = await self._until_healthy(process, url)
            if end is not None:
                if not self._first_ready.done():
                    raise WorkerFailed(_why_failed(end, process.last_lines()))
                served = 0.0
            else:
                log.info("the worker is ready")
                begin = time.monotonic()
                self._serving_url = url
                if not self._first_ready.done():
                    self._first_ready.set_result(None)
                end = await process.wait_broken()
                served = time.monotonic() - begin
        finally:
            self._serving_url = None
            await process.kill()
        log.error("the worker ended (%s)", end)
        return served

    async def _until_healthy(self, process: WorkerProcess, url: str) -> str | None:
        """Wait for the first good health check: None, or how the process ended before it."""
        ended = asyncio.create_task(process.wait())
        try:
            while not ended.done():
                if await answers_health(self._client, url):
                    return None
                await asyncio.wait({ended}, timeout=PROBE_INTERVAL_S)
            return ended.result()
        finally:
            ended.cancel()


def _why_failed(end: str, lines: list[str]) -> str:
    """One sentence: what the plugin said last, else the last exception, else the last line."""
    said = [line for line in lines if re.search(r"\bsgl-kvc( cannot serve this)?: ", line)]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b.*: ", line)]
    last = (said or raised or lines or ["it logged nothing"])[-1].strip()
    reason = re.sub(r"^\[[^]]*\] ", "", last)  # SGLang's time stamp
    return f"the SGLang worker ended ({end}) before it was ready: {reason}"
