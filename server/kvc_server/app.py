"""The gateway as an ASGI application: the routes, and what they share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from kvc_server import documents
from kvc_server.admission import Admission, shutting_down
from kvc_server.documents import Documents
from kvc_server.errors import HANDLERS, ApiError
from kvc_server.inference import Inference, json_object
from kvc_server.knob import HEADER
from kvc_server.launch import Program
from kvc_server.limits import read_body
from kvc_server.metrics import Metrics, MetricsMiddleware
from kvc_server.policies import catalogue
from kvc_server.proxy import Forward, request_headers, upstream_request
from kvc_server.settings import Settings
from kvc_server.supervisor import LocalWorker, worker_program
from kvc_server.worker import RemoteWorker, Worker

Endpoint = Callable[..., Coroutine[Any, Any, Response]]
INFERENCE = ("/v1/chat/completions", "/v1/completions", "/generate")
TOKENIZE = "/v1/tokenize"
OTHERS = ("/v1/models", "/v1/kv_policies", "/live", "/health", "/readiness", "/metrics")
_METRICS_TIMEOUT_S = 5.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def create_app(settings: Settings, program: Program | None = None) -> FastAPI:
    """One gateway. Its worker is `app.state.worker` once the lifespan has begun.

    Parameters
    ----------
    program : the worker to start where `settings` names none that runs; None is SGLang.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _client(settings) as client:
            worker: Worker
            if settings.worker_url is not None:
                worker = RemoteWorker(settings.worker_url, client, settings.watch)
            else:
                worker = LocalWorker(program or worker_program(settings), settings, client, metrics)
            app.state.client, app.state.worker = client, worker
            await worker.start()
            try:
                yield
            finally:
                await stored.close()
                await worker.stop()

    app = FastAPI(
        title="sgl-kvc",
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,  # it would lead to whatever Host the client named
        exception_handlers=HANDLERS,
    )
    app.state.admission = admission = Admission(settings.limits.max_in_flight)
    endpoints = (*INFERENCE, TOKENIZE, documents.PATH, *OTHERS)
    app.add_middleware(MetricsMiddleware, metrics=metrics, endpoints=endpoints)

    def forward(scope: Scope, path: str, content: bytes | None) -> Forward:
        client = app.state.client
        upstream = upstream_request(
            client,
            "GET" if content is None else "POST",
            app.state.worker.url(),
            path,
            scope["query_string"],
            request_headers(scope["headers"]),
            content,
        )
        return Forward(client, upstream, metrics, path)

    async def models(request: Request) -> Response:
        return forward(request.scope, "/v1/models", None)

    async def tokenize(request: Request) -> Response:
        body = await read_body(request.headers, request.receive, settings.limits)
        return forward(request.scope, TOKENIZE, bytes(body))

    async def ask(method: str, path: str, content: Any) -> httpx.Response:
        url = f"{app.state.worker.url()}{path}"
        answer: httpx.Response = await app.state.client.request(method, url, json=content)
        return answer

    stored = Documents(ask, settings)

    async def keep(request: Request) -> Response:
        body = json_object(await read_body(request.headers, request.receive, settings.limits))
        with admission.admitted() as cut:
            answer = JSONResponse(await stored.create(body, request.headers.getlist(HEADER)))
        if cut.cancelled_caught:
            raise shutting_down()
        return answer

    async def kept(request: Request) -> Response:
        return JSONResponse(await stored.all(request.query_params.get("cache_salt")))

    async def release(request: Request) -> Response:
        name, salt = request.path_params["name"], request.query_params.get("cache_salt")
        return JSONResponse(await stored.release(name, salt))

    async def kv_policies() -> Response:
        return JSONResponse(catalogue())

    async def live() -> Response:
        return JSONResponse({"status": "ok"})

    async def health() -> Response:
        ready = app.state.worker.ready and not admission.draining
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def metrics_text() -> Response:
        theirs = await _worker_metrics(app)
        metrics.worker_up.set(app.state.worker.ready)
        metrics.probe_age.set(app.state.worker.probe_age)
        return Response(metrics.render() + (theirs or b""), media_type=_TEXT)

    for path in INFERENCE:
        endpoint = Inference(path, settings, admission, forward)
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
        app.add_api_route(path, _allowed("OPTIONS, POST"), methods=["OPTIONS"])
    app.add_api_route(TOKENIZE, tokenize, methods=["POST"])
    app.add_api_route(TOKENIZE, _allowed("OPTIONS, POST"), methods=["OPTIONS"])
    app.add_api_route(documents.PATH, keep, methods=["POST"])
    app.add_api_route(documents.PATH, kept, methods=["GET", "HEAD"])
    app.add_api_route(documents.PATH, _allowed("GET, HEAD, OPTIONS, POST"), methods=["OPTIONS"])
    app.add_api_route(f"{documents.PATH}/{{name}}", release, methods=["DELETE"])
    others: tuple[Endpoint, ...] = (models, kv_policies, live, health, health, metrics_text)
    for path, answer in zip(OTHERS, others, strict=True):
        app.add_api_route(path, answer, methods=["GET", "HEAD"])
        app.add_api_route(path, _allowed("GET, HEAD, OPTIONS"), methods=["OPTIONS"])
    return app


def _allowed(methods: str) -> Endpoint:
    """What answers OPTIONS."""

    async def options() -> Response:
        return Response(status_code=204, headers={"Allow": methods})

    return options


def _client(settings: Settings) -> httpx.AsyncClient:
    """One client for all requests, with no cap on connections.

    Every request has a connection of its own: a kept one may be closing at the worker's end just
    when the next request is written, and a generation cannot be sent again without harm.
    """
    return httpx.AsyncClient(
        timeout=httpx.Timeout(
            connect=settings.connect_timeout, read=settings.read_timeout, write=60.0, pool=None
        ),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
    )


async def _worker_metrics(app: FastAPI) -> bytes | None:
    """The worker's own metrics in text format, or None when it does not answer."""
    try:
        answer = await app.state.client.get(
            f"{app.state.worker.url()}/metrics",
            headers={"accept": "text/plain"},
            timeout=_METRICS_TIMEOUT_S,
            follow_redirects=True,
        )
    except (ApiError, httpx.HTTPError):
        return None
    return answer.content if answer.status_code == 200 else None
