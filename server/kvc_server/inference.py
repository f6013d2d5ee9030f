"""A request with a body: let in, read, its knob put where the worker looks, and forwarded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from anyio import to_process
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvc_server import knob
from kvc_server.admission import Admission, shutting_down
from kvc_server.authentication import TENANT
from kvc_server.demand import Ask, Demand, context_length, demand_of, prompt_lengths
from kvc_server.errors import ApiError
from kvc_server.limits import discard_body, read_body
from kvc_server.observing import RECORD
from kvc_server.proxy import Forward
from kvc_server.quotas import Quotas
from kvc_server.record import CLIENT_GONE, Record
from kvc_server.routes import GENERATING, Place
from kvc_server.settings import Settings
from kvc_server.tenants import Tenant
from sgl_kvc.spec import KNOB_HEADER, NAMESPACE_HEADER

#: Larger bodies are parsed in a process of their own: in this one nobody else would be served
#: meanwhile, in whichever thread. Below, that takes less than the way there.
BIG_BODY_BYTES = 256 * 1024

Added = list[tuple[bytes, bytes]]
MakeForward = Callable[[Scope, str, bytes | None, Added], Forward]


@dataclasses.dataclass(frozen=True)
class Shared:
    """What all endpoints of a gateway have in common.

    Attributes
    ----------
    forward : makes the response that relays the worker's, from scope, path, body and headers
        that are added.
    ask : asks the worker something of the gateway's own.
    """

    settings: Settings
    admission: Admission
    quotas: Quotas
    forward: MakeForward
    ask: Ask


class Inference:
    """The endpoint of one path, an ASGI application.

    Parameters
    ----------
    path : the route's path, also the worker's.
    place : where the worker looks for the knob; None passes the body on as it is.
    """

    def __init__(self, path: str, place: Place | None, shared: Shared):
        self._path = path
        self._place = place
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant: Tenant | None = scope.get(TENANT)
        forward: Forward | None = None
        if (refusal := self._shared.admission.refusal()) is not None:
            await discard_body(receive)
            raise refusal
        with self._shared.admission.admitted() as cut:
            if tenant is not None:
                scope[RECORD].held.enter_context(self._shared.quotas.running(tenant))
            placed = await self._placed(Headers(scope=scope), receive, tenant)
            await self._reserve(tenant, placed.demand, scope[RECORD])
            forward = self._shared.forward(scope, self._path, placed.content, placed.added)
            await forward(scope, receive, send)
        if cut.cancelled_caught:
            if forward is None or not forward.started:
                raise shutting_down()
            await forward.end_with(shutting_down(), send)

    async def _placed(self, headers: Headers, receive: Receive, tenant: Tenant | None) -> Placed:
        body = await read_body(headers, receive, self._shared.settings.limits)
        added = [] if tenant is None else [_header(NAMESPACE_HEADER, tenant.namespace)]
        if self._place is None:
            return Placed(bytes(body), added)
        settings = self._shared.settings if tenant is None else tenant.settings
        request = (body, self._path, headers.getlist(knob.HEADER), settings, tenant)
        if len(body) <= BIG_BODY_BYTES:
            placed = place_bytes(*request)
        else:
            placed = await to_process.run_sync(place_bytes, *request, cancellable=True)
        return dataclasses.replace(placed, added=[*placed.added, *added])

    async def _reserve(self, tenant: Tenant | None, demand: Demand | None, record: Record) -> None:
        """Take the tokens that the request may use from what its key has. Raises ApiError 429.

        What was not used is given back at its end, where the worker tells how much was.
        """
        if tenant is None or tenant.tokens_per_minute is None or demand is None:
            return
        context = await context_length(self._shared.ask)
        if context is None:
            raise ApiError(502, "the worker does not tell its model's length", code="worker_lost")
        lengths = await prompt_lengths(demand, context, self._shared.ask)
        quotas = self._shared.quotas
        reservation = quotas.reserve(tenant, demand.tokens(lengths, context))

        def settle() -> None:
            refused = record.status != CLIENT_GONE and int(record.status) >= 400
            if record.results or refused:
                quotas.settle(reservation, sum(map(tokens_used, record.results)))

        record.held.callback(settle)


@dataclasses.dataclass(frozen=True)
class Placed:
    """A request as the worker should get it.

    Attributes
    ----------
    added : headers to add.
    demand : what it may take; None where nobody needs to know.
    """

    content: bytes
    added: Added
    demand: Demand | None = None


def place_bytes(
    body: bytes | bytearray,
    path: str,
    header: list[str],
    settings: Settings,
    tenant: Tenant | None = None,
) -> Placed:
    """A request's JSON text to the worker's: the knob at its place, and what its key decides.

    Parameters
    ----------
    path : of an endpoint that generates.
    header : the values of `knob.HEADER`.
    """
    content = json_object(body)
    place, demand = GENERATING[path], None
    added: Added = []
    if tenant is not None:
        content = _decided(content, tenant)
        demand = demand_of(path, content) if tenant.tokens_per_minute is not None else None
    if place is Place.HEADER:
        content, given = knob.take(content, header, settings)
        added = [_header(KNOB_HEADER, json.dumps(given))]
    else:
        native = place is Place.SAMPLING_PARAMS
        content = knob.place(content, header, native=native, settings=settings)
    return Placed(json.dumps(content).encode(), added, demand)


def _decided(body: dict[str, Any], tenant: Tenant) -> dict[str, Any]:
    """The body without what its key decides instead: priority, and the id by which it is stored."""
    kept = {name: value for name, value in body.items() if name not in ("priority", "request_id")}
    return kept if tenant.priority is None else kept | {"priority": tenant.priority}


def tokens_used(result: Any) -> int:
    """Tokens of a choice's prompt and answer, by its `kv_compression` object."""
    fields = result if isinstance(result, dict) else {}
    counts = (fields.get("prompt_tokens"), fields.get("completion_tokens"))
    return sum(count for count in counts if isinstance(count, int))


def _header(name: str, value: str) -> tuple[bytes, bytes]:
    return name.encode(), value.encode()


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """The object that a body is. Raises ApiError 400."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return content
