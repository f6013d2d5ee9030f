"""`sgl-kvc serve`: run the gateway until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import socket
import sys

import uvicorn

from kvc_server.app import create_app
from kvc_server.embedded import RECALL, embedded_model
from kvc_server.proxy import request_headers
from kvc_server.serve_options import knob_limits_of, limits_of, room_of, watch_of
from kvc_server.serving import Server
from kvc_server.settings import Settings, SettingsError
from kvc_server.worker import WorkerFailed

log = logging.getLogger(__name__)

_OTHER_FILES = 256


def run(options: argparse.Namespace, worker_args: tuple[str, ...]) -> int:
    """Serve; 0 after a stop, 1 when the worker could not be started."""
    settings = settings_of(options, worker_args)
    _allow_files(settings.limits.max_in_flight)
    listener = _listen(options.host, options.port)
    return asyncio.run(_serve(settings, listener, options))


def settings_of(options: argparse.Namespace, worker_args: tuple[str, ...]) -> Settings:
    """The command line as settings. Raises SettingsError."""
    model_path, name = options.model_path, options.embedded
    if name and (model_path or options.worker_url):
        raise SettingsError("--embedded names the model; leave out --model-path and --worker-url")
    if model_path is None and options.worker_url is None:
        model_path, worker_args = embedded_model(name or RECALL, worker_args)
    return Settings(
        worker_url=options.worker_url,
        model_path=model_path,
        worker_args=worker_args,
        default_rate=options.default_rate,
        max_rate=options.max_rate,
        connect_timeout=options.connect_timeout,
        read_timeout=options.read_timeout,
        limits=limits_of(options),
        knob_limits=knob_limits_of(options),
        room=room_of(options),
        watch=watch_of(options),
        keys=options.keys,
        access_log=options.access_log,
        traces=options.traces,
        cors_origins=tuple(options.cors_origin),
    )


async def _serve(settings: Settings, listener: socket.socket, options: argparse.Namespace) -> int:
    app = create_app(settings)
    server = Server(
        uvicorn.Config(
            app,
            log_level=options.log_level,
            access_log=options.log_level == "debug",
            log_config=None,
        ),
        app.state.admission,
        settings.limits,
    )
    failures: list[WorkerFailed] = []

    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(0.05)
        try:
            await app.state.worker.until_ready()
        except WorkerFailed as error:
            failures.append(error)
            server.should_exit = True
            return
        host, port = listener.getsockname()[:2]
        print(_welcome(host, port, await _model_name(app)), flush=True)

    announcing = asyncio.create_task(announce())
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
    for failure in failures:
        print(f"sgl-kvc serve: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _allow_files(requests: int) -> None:
    """Raise our limit of open files to what so many requests need, as far as the system lets us."""
    needed = 2 * requests + _OTHER_FILES  # a connection to the client, one to the worker
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < needed:
        log.warning(
            "--max-in-flight %d needs %d open files, and we may have %d (ulimit -n)",
            requests, needed, most,
        )  # fmt: skip


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"cannot listen on {host} port {port}: {error}; choose another --host or --port"
        ) from None
    listener.set_inheritable(False)
    return listener


async def _model_name(app: object) -> str:
    """The name the worker gives its model."""
    state = app.state  # type: ignore[attr-defined]
    try:
        headers = dict(request_headers([], state.worker.key))
        url = f"{state.worker.url()}/v1/models"
        answer = await state.client.get(url, headers=headers, timeout=10)
        return answer.json()["data"][0]["id"]
    except Exception as error:  # only decorates what is printed
        log.warning("the worker does not name its model: %r", error)
        return "default"


def _welcome(host: str, port: int, model: str) -> str:
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return _WELCOME.format(base=base, model=model)


_WELCOME = """
sgl-kvc is ready on {base}

curl -s {base}/v1/chat/completions -H 'Content-Type: application/json' \
-d '{{"model": "{model}", "max_tokens": 8, "temperature": 0, "kv_compression": {{"rate": 8}}, \
"messages": [{{"role": "user", "content": "the code for red falcon is tango seven kilo . \
what is the code for red falcon ?"}}]}}'

from openai import OpenAI

client = OpenAI(base_url="{base}/v1", api_key="none")
filler = "the old river waits near the quiet village . " * 60
answer = client.chat.completions.create(
    model="{model}", max_tokens=8, temperature=0,
    messages=[{{"role": "user", "content": filler + "the code for red falcon is tango seven kilo . "
               + filler + "what is the code for red falcon ?"}}],
    extra_body={{"kv_compression": {{"rate": 8}}}},
)
print(answer.choices[0].message.content, answer.kv_compression)
"""
