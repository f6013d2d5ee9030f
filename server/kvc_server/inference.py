"""A request with a body: let in, read, its knob put where the worker looks, and forwarded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvc_server import knob
from kvc_server.admission import Admission, shutting_down
from kvc_server.authentication import TENANT
from kvc_server.demand import Ask, Demand, Measured, context_length, measure
from kvc_server.errors import ApiError
from kvc_server.limits import discard_body, read_body
from kvc_server.observing import RECORD
from kvc_server.placing import Added, Placed, carried, place_body
from kvc_server.proxy import Forward, while_connected
from kvc_server.quotas import Quotas
from kvc_server.record import CLIENT_GONE, Record
from kvc_server.reports import Reports
from kvc_server.room import Room
from kvc_server.routes import Place
from kvc_server.settings import Settings
from kvc_server.tenants import Tenant
from sgl_kvc.spec import KNOB_HEADER, NAMESPACE_HEADER, routed

MakeForward = Callable[[Scope, str, bytes | None, Added, Reports | None], Forward]


@dataclasses.dataclass(frozen=True)
class Shared:
    """What all endpoints of a gateway have in common.

    Attributes
    ----------
    forward : makes the response that relays the worker's, from scope, path, body, headers that
        are added, and what its reports are held against.
    ask : asks the worker something of the gateway's own.
    room : who is let in by memory; None is everybody.
    """

    settings: Settings
    admission: Admission
    quotas: Quotas
    forward: MakeForward
    ask: Ask
    room: Room | None = None


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
            placed, reports = await self._let_in(scope, receive, tenant)
            forward = self._shared.forward(
                scope, self._path, placed.content, placed.added, reports
            )
            await forward(scope, receive, send)
        if cut.cancelled_caught:
            if forward is None or not forward.started:
                raise shutting_down()
            await forward.end_with(shutting_down(), send)

    async def _let_in(
        self, scope: Scope, receive: Receive, tenant: Tenant | None
    ) -> tuple[Placed, Reports | None]:
        """The request as the worker should get it, once there are tokens and memory for it."""
        headers, record = Headers(scope=scope), scope[RECORD]
        settings = self._shared.settings if tenant is None else tenant.settings
        body = await read_body(headers, receive, settings.limits)
        added = [] if tenant is None else carried(NAMESPACE_HEADER, tenant.namespace, settings)
        if self._place is None:
            return Placed(bytes(body), added), None
        told = (headers.getlist(knob.HEADER), headers.get(routed(KNOB_HEADER)))
        request = (body, self._path, *told, settings, tenant)
        placed = await place_body(*request)
        prompts: tuple[Measured, ...] = ()
        if placed.demand is not None:
            prompts = await measure(placed.demand, self._shared.ask)
        await self._reserve(tenant, placed.demand, prompts, record)
        rate = None
        if self._shared.room is not None:
            admit = self._shared.room.admit(placed, prompts, tenant, record)
            rate = await while_connected(receive, admit)
            if rate is not None:
                placed = await place_body(*request, rate)
        reports = Reports(placed.specs, placed.elastic, rate)
        seen = settings.worker_url is not None or placed.elastic is not None
        kept = dataclasses.replace(placed, added=[*placed.added, *added])
        return kept, reports if seen and not reports.silent else None

    async def _reserve(
        self,
        tenant: Tenant | None,
        demand: Demand | None,
        prompts: tuple[Measured, ...],
        record: Record,
    ) -> None:
        """Take the tokens that the request may use from what its key has. Raises ApiError 429.

        What was not used is given back at its end, where the worker tells how much was.
        """
        if tenant is None or tenant.tokens_per_minute is None or demand is None:
            return
        context = await context_length(self._shared.ask)
        if context is None:
            raise ApiError(502, "the worker does not tell its model's length", code="worker_lost")
        quotas = self._shared.quotas
        reservation = quotas.reserve(tenant, demand.most(prompts, context))

        def settle() -> None:
            refused = record.status != CLIENT_GONE and int(record.status) >= 400
            if record.results or refused:
                quotas.settle(reservation, sum(map(tokens_used, record.results)))

        record.held.callback(settle)


def tokens_used(result: Any) -> int:
    """Tokens of a choice's prompt and answer, by its `kv_compression` object."""
    fields = result if isinstance(result, dict) else {}
    counts = (fields.get("prompt_tokens"), fields.get("completion_tokens"))
    return sum(count for count in counts if isinstance(count, int))
