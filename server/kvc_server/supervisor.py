"""The worker that the gateway starts: ready, watched, and started again when it ends or hangs."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

import httpx

from kvc_server.errors import worker_down
from kvc_server.launch import Program, reserved_port, sglang
from kvc_server.metrics import Metrics
from kvc_server.probe import Probe
from kvc_server.process import WorkerProcess
from kvc_server.settings import Settings
from kvc_server.worker import LOOK_INTERVAL_S, WorkerFailed, ended
from sgl_kvc.spec import WORKER_KEYS

log = logging.getLogger(__name__)

WORKER_ARGS = (
    "--attention-backend", "kvc", "--radix-cache-backend", "kvc", "--page-size", "16",
    "--enable-metrics", "--enable-cache-report",
)  # fmt: skip
STABLE_AFTER_S = 60.0


class PortTaken(Exception):
    """Somebody else's process listens where the worker was to."""


def worker_program(settings: Settings) -> Program:
    """SGLang on the model of `settings`; the user's arguments stand last and win."""
    assert settings.model_path is not None
    return sglang(settings.model_path, *WORKER_ARGS, *settings.worker_args)


class LocalWorker:
    """Starts one server on a loopback port, and starts it again when it ends or hangs.

    A worker that is not ready the first time is not started again: `until_ready` raises.
    Later failures, of whatever kind, are retried for ever, waiting longer each time.
    """

    def __init__(
        self, program: Program, settings: Settings, client: httpx.AsyncClient, metrics: Metrics
    ):
        self._program = program
        self._watch = settings.watch
        self._client = client
        self._metrics = metrics
        self._process: WorkerProcess | None = None
        self._probe: Probe | None = None
        self._serving_url: str | None = None
        # known to this process and the worker's alone: other local users reach its port too
        self._keys = {name: secrets.token_urlsafe(32) for name in WORKER_KEYS.values()}
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self._why_not() is None and self._probe is not None and self._probe.ready

    @property
    def probe_age(self) -> float:
        return self._probe.silent_s if self._probe is not None else 0.0

    def url(self) -> str:
        if why := self._why_not():
            raise worker_down(why)
        assert self._serving_url is not None
        return self._serving_url

    @property
    def key(self) -> str:
        return self._keys[WORKER_KEYS["api_key"]]

    @property
    def admin_key(self) -> str:
        return self._keys[WORKER_KEYS["admin_api_key"]]

    async def start(self) -> None:
        self._task = asyncio.create_task(self._supervise())

    async def until_ready(self) -> None:
        await asyncio.shield(self._first_ready)

    async def stop(self) -> None:
        await ended(self._task)
        self._first_ready.cancel()

    def _why_not(self) -> str | None:
        """Why no request should be sent there now; None if there is no reason."""
        if self._serving_url is None or self._process is None or not self._process.running:
            return "the worker is starting"
        if (self._probe is not None and self._probe.hangs) or self._process.stopped_s:
            return "the worker does not answer"
        return None

    async def _supervise(self) -> None:
        failures = 0
        while True:
            served = 0.0
            try:
                with reserved_port() as port:
                    served = await self._run_once(port)
            except PortTaken as error:
                log.error("%s; trying another", error)
            except Exception as error:
                if not self._first_ready.done():
                    failed = isinstance(error, WorkerFailed)
                    told = error if failed else WorkerFailed(f"the worker was not started: {error}")
                    self._first_ready.set_exception(told)
                    return
                log.exception("the worker was not started")
            failures = 0 if served > STABLE_AFTER_S else failures + 1
            longest = self._watch.longest_backoff
            delay = 0.0 if failures <= 1 else min(2.0 ** min(failures - 2, 30), longest)
            log.warning("starting the worker again in %g s", delay)
            await asyncio.sleep(delay)
            self._metrics.worker_restarts.inc()

    async def _run_once(self, port: int) -> float:
        """One life of the worker; seconds for which it served. Leaves no process behind."""
        url = f"http://127.0.0.1:{port}"
        command = self._program.command(port)
        self._process = process = await WorkerProcess.start(command, self._keys)
        self._probe = probe = Probe(self._client, url, self._watch)
        probing = asyncio.create_task(probe.run())
        served = 0.0
        try:
            end = await self._until_ready(process, probe, port)
            if end is not None:
                await process.kill()
                if await _answers(port):
                    raise PortTaken(f"another process listens on the worker's port {port}")
                if not self._first_ready.done():
                    raise WorkerFailed(_why_failed(end, process.last_lines()))
            else:
                log.info("the worker is ready")
                begin = time.monotonic()
                self._serving_url = url
                if not self._first_ready.done():
                    self._first_ready.set_result(None)
                end = await self._until_broken(process, probe)
                served = time.monotonic() - begin
        finally:
            self._serving_url = None
            await ended(probing)
            await process.kill()
        log.error("the worker ended (%s)", end)
        return served

    async def _until_ready(self, process: WorkerProcess, probe: Probe, port: int) -> str | None:
        """Wait for the first good health check: None, or how the start ended before it.

        Whoever answers is asked for nothing else until the listener is known to be ours: on
        Linux everybody who sets SO_REUSEADDR can bind a port that is only reserved.
        """
        begin = time.monotonic()
        over = asyncio.create_task(process.wait())
        try:
            while not over.done():
                if probe.ready:
                    if process.listens_on(port):
                        return None
                    return "another process listens on its port"
                if time.monotonic() > begin + self._watch.start_timeout:
                    return f"killed after {self._watch.start_timeout:g} s, --start-timeout"
                await asyncio.wait({over}, timeout=LOOK_INTERVAL_S)
            return over.result()
        finally:
            over.cancel()

    async def _until_broken(self, process: WorkerProcess, probe: Probe) -> str:
        """Wait until a worker that was ready has ended or hung for too long; how that showed."""
        over = asyncio.create_task(process.wait_broken())
        hang_timeout = self._watch.hang_timeout
        try:
            while not over.done():
                if process.stopped_s > hang_timeout:
                    return f"stopped by a signal for {hang_timeout:g} s"
                if probe.hangs and probe.silent_s > hang_timeout + self._watch.interval:
                    return f"no answer for {hang_timeout:g} s"
                await asyncio.wait({over}, timeout=LOOK_INTERVAL_S)
            return over.result()
        finally:
            over.cancel()


async def _answers(port: int) -> bool:
    """Whether anybody listens on the loopback `port`."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def _why_failed(end: str, lines: list[str]) -> str:
    """One sentence: what the plugin said last, else the last exception, else the last line."""
    said = [line for line in lines if re.search(r"\bsgl-kvc( cannot serve this)?: ", line)]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b.*: ", line)]
    last = (said or raised or lines or ["it logged nothing"])[-1].strip()
    reason = re.sub(r"^\[[^]]*\] ", "", last)  # SGLang's time stamp
    return f"the SGLang worker ended ({end}) before it was ready: {reason}"
