"""The gateway as an ASGI application: the routes, and what they share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from kvc_server import routes, tracing
from kvc_server.admission import Admission
from kvc_server.authentication import TENANT, AuthenticationMiddleware
from kvc_server.connections import OneEach
from kvc_server.demand import Ask
from kvc_server.documents import Documents
from kvc_server.errors import HANDLERS, ApiError, from_worker
from kvc_server.inference import Inference, Shared
from kvc_server.keeping import Keeping
from kvc_server.launch import Program
from kvc_server.metrics import Metrics
from kvc_server.observing import RECORD, REQUEST_ID, ObservingMiddleware, access_log
from kvc_server.openapi import document
from kvc_server.page import add_page
from kvc_server.placing import Added
from kvc_server.policies import catalogue
from kvc_server.proxy import Forward, request_headers, upstream_request
from kvc_server.quotas import Quotas
from kvc_server.reports import Reports
from kvc_server.room import Room
from kvc_server.settings import Settings
from kvc_server.supervisor import LocalWorker, worker_program
from kvc_server.tenants import KeyFile
from kvc_server.worker import RemoteWorker, Worker

Endpoint = Callable[..., Coroutine[Any, Any, Response]]
_METRICS_TIMEOUT_S = 5.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
#: What scripts of other origins may read of an answer besides its body.
_EXPOSED = ("Retry-After", "WWW-Authenticate", REQUEST_ID)


def create_app(settings: Settings, program: Program | None = None) -> FastAPI:
    """One gateway. Its worker is `app.state.worker` once the lifespan has begun.

    Parameters
    ----------
    program : the worker to start where `settings` names none that runs; None is SGLang.
    """
    metrics = Metrics()
    traces = tracing.provider() if settings.traces else None

    @contextlib.asynccontextmanager
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
                await documents.close()
                if room is not None:
                    await room.close()
                await worker.stop()
                if traces is not None:  # it may wait for the collector
                    await anyio.to_thread.run_sync(traces.shutdown)

    app = FastAPI(
        title="sgl-kvc",
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,  # it would lead to whatever Host the client named
        exception_handlers=HANDLERS,
    )
    app.state.admission = admission = Admission(settings.limits.max_in_flight)
    if settings.keys is not None:
        keys = KeyFile(Path(settings.keys), settings)
        app.add_middleware(AuthenticationMiddleware, keys=keys)
    if traces is not None:
        app.add_middleware(tracing.TracingMiddleware, provider=traces)
    write = None if settings.access_log is None else access_log(settings.access_log)
    app.add_middleware(ObservingMiddleware, metrics=metrics, write=write)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )

    def forward(
        scope: Scope,
        path: str,
        content: bytes | None,
        added: Added,
        reports: Reports | None = None,
    ) -> Forward:
        client, worker = app.state.client, app.state.worker
        upstream = upstream_request(
            client,
            scope["method"].replace("HEAD", "GET"),
            worker.url(),
            path,
            scope["query_string"],
            [*request_headers(scope["headers"], worker.key, private=TENANT in scope), *added],
            content,
        )
        return Forward(client, upstream, metrics, scope[RECORD], reports)

    async def ask(path: str, content: bytes | None) -> httpx.Response:
        client, worker = app.state.client, app.state.worker
        key = worker.admin_key if path == routes.SET_STATE else worker.key
        method, headers = "GET" if content is None else "POST", request_headers([], key)
        if content is not None:
            headers.append((b"content-type", b"application/json"))
        url = worker.url() + path
        return await client.request(method, url, headers=headers, content=content)

    async def models(request: Request) -> Response:
        return forward(request.scope, routes.MODELS, None, [])

    async def model_info(request: Request) -> Response:
        return forward(request.scope, routes.MODEL_INFO, None, [])

    async def model(request: Request) -> Response:
        return JSONResponse(await _model_card(ask, request.path_params["model"]))

    async def stored(request: Request) -> Response:
        path = routes.response_path(request.path_params["response_id"])
        return forward(request.scope, path, None, [])

    async def cancel(request: Request) -> Response:
        path = routes.response_path(request.path_params["response_id"], "/cancel")
        return forward(request.scope, path, b"", [])

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
        if room is not None:
            await room.tell()
        return Response(metrics.render() + (theirs or b""), media_type=_TEXT)

    async def openapi() -> Response:
        return JSONResponse(document())

    room = None if settings.room is None else Room(settings.room, ask, metrics)
    shared = Shared(settings, admission, Quotas(), forward, ask, room)
    documents = Documents(ask)
    keeping = Keeping(documents, shared)
    for path in (*routes.GENERATING, *routes.PASSED):
        endpoint = Inference(path, routes.GENERATING.get(path), shared)
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
        _add_options(app, path, "OPTIONS, POST")
    _add(app, routes.CANCEL, cancel, "POST")
    read: dict[str, Endpoint] = {
        routes.MODELS: models, routes.MODEL: model, routes.RESPONSE: stored,
        routes.MODEL_INFO: model_info, routes.GET_MODEL_INFO: model_info,
        "/v1/kv_policies": kv_policies, "/live": live, "/health": health, "/readiness": health,
        "/metrics": metrics_text, "/openapi.json": openapi,
    }  # fmt: skip
    for path, answer in read.items():
        _add(app, path, answer, "GET", "HEAD")
    app.add_api_route(routes.DOCUMENTS, keeping.keep, methods=["POST"])
    app.add_api_route(routes.DOCUMENTS, keeping.kept, methods=["GET", "HEAD"])
    _add_options(app, routes.DOCUMENTS, "GET, HEAD, OPTIONS, POST")
    _add(app, routes.DOCUMENT, keeping.release, "DELETE")
    add_page(app)
    return app


def _add(app: FastAPI, path: str, endpoint: Endpoint, *methods: str) -> None:
    app.add_api_route(path, endpoint, methods=list(methods))
    _add_options(app, path, ", ".join(sorted([*methods, "OPTIONS"])))


def _add_options(app: FastAPI, path: str, allowed: str) -> None:
    """Answer OPTIONS, which tells the methods there are."""

    async def options() -> Response:
        return Response(status_code=204, headers={"Allow": allowed})

    app.add_api_route(path, options, methods=["OPTIONS"])


def _client(settings: Settings) -> httpx.AsyncClient:
    """One client for all requests, with no cap on connections."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(
            connect=settings.connect_timeout, read=settings.read_timeout, write=60.0, pool=None
        ),
        transport=OneEach(),
        trust_env=False,
    )


async def _model_card(ask: Ask, name: str) -> Any:
    """One of the worker's models, also an adapter. Raises ApiError 404 for another name."""
    answer = await ask(routes.MODELS, None)
    if answer.status_code != 200:
        raise from_worker(answer.status_code, answer.content, answer.headers)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        for card in answer.json()["data"]:
            if card["id"] == name:
                return card
    told = f"the model '{name}' does not exist; GET {routes.MODELS} lists those that do"
    raise ApiError(404, told, param="model", code="model_not_found")


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
