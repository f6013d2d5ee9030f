"""The endpoints of `/v1/kv_cache`: whose document it is, and what its key has left for it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvc_server.admission import shutting_down
from kvc_server.authentication import TENANT
from kvc_server.documents import Documents, Owner
from kvc_server.inference import Shared
from kvc_server.knob import HEADER
from kvc_server.limits import read_body
from kvc_server.observing import RECORD
from kvc_server.placing import json_object
from kvc_server.tenants import Tenant


class Keeping:
    """Making, listing and releasing the documents of whoever asks."""

    def __init__(self, documents: Documents, shared: Shared):
        self._documents = documents
        self._shared = shared

    async def keep(self, request: Request) -> Response:
        tenant: Tenant | None = request.scope.get(TENANT)
        with self._shared.admission.admitted() as cut:
            if tenant is not None:
                held = request.scope[RECORD].held
                held.enter_context(self._shared.quotas.running(tenant))
            limits = self._shared.settings.limits
            body = json_object(await read_body(request.headers, request.receive, limits))
            header = request.headers.getlist(HEADER)
            answer = JSONResponse(await self._documents.create(body, header, self._owner(request)))
        if cut.cancelled_caught:
            raise shutting_down()
        return answer

    async def kept(self, request: Request) -> Response:
        salt = request.query_params.get("cache_salt")
        return JSONResponse(await self._documents.all(salt, self._owner(request)))

    async def release(self, request: Request) -> Response:
        name, salt = request.path_params["name"], request.query_params.get("cache_salt")
        return JSONResponse(await self._documents.release(name, salt, self._owner(request)))

    def _owner(self, request: Request) -> Owner:
        tenant: Tenant | None = request.scope.get(TENANT)
        if tenant is None:
            return Owner(self._shared.settings)

        def reserve(tokens: int) -> None:
            """Take them from what the key has; given back if the document cannot be kept."""
            if tenant.tokens_per_minute is None:
                return
            quotas, record = self._shared.quotas, request.scope[RECORD]
            reservation = quotas.reserve(tenant, tokens)

            def settle() -> None:
                quotas.settle(reservation, tokens if record.status == "200" else 0)

            record.held.callback(settle)

        return Owner(tenant.settings, tenant.namespace, tenant.priority, reserve)
