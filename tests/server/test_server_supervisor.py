"""A worker that ends, hangs or cannot be started: noticed, told, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn
from kvc_server.app import create_app
from kvc_server.errors import ApiError
from kvc_server.launch import Program
from kvc_server.probe import Watch
from kvc_server.settings import Settings
from kvc_server.supervisor import LocalWorker
from kvc_server.worker import WorkerFailed

from tests.server.stub_worker import PATIENCE

#: A server of a few lines that says 200 to everything.
SERVE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    do_POST = do_GET
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
STUB = Program(("-c", SERVE))
SLEEPER = Program(("-c", "import time; time.sleep(600)"))
#: What production waits minutes for, in tenths of a second.
WATCH = Watch(interval=0.1, engine_interval=0.1, timeout=0.5, hang_timeout=1.5,
              start_timeout=30, longest_backoff=0.5)  # fmt: skip


@dataclasses.dataclass
class Stage:
    """A gateway in this process, its worker, and a client of it.

    Attributes
    ----------
    others : child processes that are not the gateway's: other tests' servers.
    """

    worker: LocalWorker
    client: httpx.AsyncClient
    others: list[psutil.Process]

    @property
    def process(self) -> psutil.Process:
        """The worker's process now."""
        (child,) = (each for each in psutil.Process().children() if each not in self.others)
        return child

    async def status(self, path: str) -> int:
        return (await self.client.get(path)).status_code

    async def ask(self) -> int:
        return (await self.client.post("/generate", json={"text": "a"})).status_code

    async def until(self, condition: Callable[[], bool], within_s: float = PATIENCE) -> float:
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() < begin + within_s, "it never came"
            await asyncio.sleep(0.01)
        return time.monotonic() - begin


@contextlib.asynccontextmanager
async def staged(program: Program = STUB, watch: Watch = WATCH) -> AsyncIterator[Stage]:
    others = psutil.Process().children()
    app = create_app(Settings(model_path="stub", watch=watch), program)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            yield Stage(app.state.worker, client, others)
    finally:
        server.should_exit = True
        await running
    assert set(psutil.Process().children()) <= set(others), "no process is left"


def play(scenario, **options) -> None:
    async def stage() -> None:
        async with staged(**options) as it:
            await asyncio.wait_for(scenario(it), 2 * PATIENCE)

    asyncio.run(stage())


async def all_serve(stage: Stage, serves: bool) -> None:
    """Every way to ask says the same."""
    code = 200 if serves else 503
    assert [await stage.status(path) for path in ("/readiness", "/health")] == [code, code]
    assert await stage.ask() == code
    assert await stage.status("/live") == 200


@pytest.mark.parametrize("resumed", [True, False])
def test_a_stopped_worker_is_noticed_and_replaced(resumed: bool) -> None:
    async def scenario(stage: Stage) -> None:
        await stage.worker.until_ready()
        await all_serve(stage, True)
        first = stage.process
        first.send_signal(signal.SIGSTOP)
        assert await stage.until(lambda: not stage.worker.ready) < 15
        await all_serve(stage, False)
        if resumed:
            first.send_signal(signal.SIGCONT)
        await stage.until(lambda: stage.worker.ready)
        await all_serve(stage, True)
        assert (stage.process == first) == resumed

    play(scenario)


def test_a_worker_that_accepts_and_never_answers_hangs() -> None:
    """Its process runs, so only asking tells."""
    hang = SERVE.replace(
        "def do_GET(self):",
        "def do_GET(self):\n"
        "        if self.path == '/hang': Handler.hangs = True\n"
        "        if getattr(Handler, 'hangs', False): import time; time.sleep(600)",
    )

    async def scenario(stage: Stage) -> None:
        await stage.worker.until_ready()
        first = stage.process
        with contextlib.suppress(httpx.HTTPError):
            await httpx.AsyncClient().get(f"{stage.worker.url()}/hang", timeout=0.1)
        await stage.until(lambda: not stage.worker.ready)
        assert stage.process == first, "it is noticed before it is killed"
        await all_serve(stage, False)
        await stage.until(lambda: stage.worker.ready)
        assert stage.process != first

    play(scenario, program=Program(("-c", hang)))


def test_readiness_does_not_ask_the_worker() -> None:
    """A probe of SGLang takes a second, a hung one's for ever: the answer is there before."""

    async def scenario(stage: Stage) -> None:
        await stage.worker.until_ready()
        os.kill(stage.process.pid, signal.SIGSTOP)
        for path in ("/readiness", "/health", "/live") * 5:
            begin = time.monotonic()
            await stage.status(path)
            assert time.monotonic() - begin < 0.1

    play(scenario, watch=dataclasses.replace(WATCH, timeout=5, hang_timeout=60))


def test_a_spawn_that_fails_is_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "server"
    script.write_text(f"#!{sys.executable}\n{SERVE}")
    script.chmod(0o700)

    class Script(Program):
        def command(self, port: int) -> list[str]:
            return [str(script), str(port)]

    async def scenario(stage: Stage) -> None:
        await stage.worker.until_ready()
        script.rename(tmp_path / "away")
        stage.process.kill()
        await stage.until(lambda: not stage.worker.ready)
        await asyncio.sleep(0.5)  # it fails a few times
        await all_serve(stage, False)
        (tmp_path / "away").rename(script)
        await stage.until(lambda: stage.worker.ready)
        await all_serve(stage, True)

    play(scenario, program=Script(()))


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_port_that_somebody_else_took_gets_no_request(goes_on: bool) -> None:
    """Whether the worker ends as it cannot listen, or goes on and hears of it later."""
    heard: list[bytes] = []
    thieves: list[asyncio.Server] = []

    async def steal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    class Robbed(Program):
        def command(self, port: int) -> list[str]:
            if len(ports) < 2:
                ports.append(port)
                listener = socket.socket()
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                thief = asyncio.start_server(steal, sock=listener)
                tasks.append(asyncio.get_running_loop().create_task(keep(thief)))
                return (SLEEPER if goes_on else STUB).command(port)
            return super().command(port)

    async def keep(thief) -> None:
        thieves.append(await thief)

    ports: list[int] = []
    tasks: list[asyncio.Task] = []

    async def scenario(stage: Stage) -> None:
        while not stage.worker.ready:
            assert await stage.ask() == 503
            await asyncio.sleep(0.05)
        await all_serve(stage, True)
        assert len(ports) == 2
        assert stage.worker.url() not in [f"http://127.0.0.1:{port}" for port in ports]
        assert not any(line.startswith(b"POST") for line in heard)
        for thief in thieves:
            thief.close()

    play(scenario, program=Robbed(STUB.python))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (SLEEPER, "killed after 0.3 s, --start-timeout"),
        (Program(("-c", "raise SystemExit('no such model')")), "no such model"),
    ],
)
def test_a_first_start_that_fails_is_told(program: Program, reason: str) -> None:
    async def scenario(stage: Stage) -> None:
        with pytest.raises(WorkerFailed, match=reason):
            await asyncio.wait_for(stage.worker.until_ready(), PATIENCE)
        with pytest.raises(ApiError):
            stage.worker.url()

    play(scenario, program=program, watch=dataclasses.replace(WATCH, start_timeout=0.3))
