"""The middleware that asks for a key, where the gateway has keys."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvc_server import page
from kvc_server.errors import ApiError
from kvc_server.observing import RECORD
from kvc_server.tenants import KeyFile, Tenant

#: Of a scope: whose request it is.
TENANT = "kvc_tenant"
#: What balancers and Kubernetes ask, and the page, which asks for a key: nothing of anybody's.
_OPEN = frozenset({"/live", "/health", "/readiness", *page.FILES})
_OPERATORS = frozenset({"/metrics"})


class AuthenticationMiddleware:
    """Lets nobody in without a key: 401. The tenant is `scope[TENANT]` from here on."""

    def __init__(self, app: ASGIApp, *, keys: KeyFile):
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._open(scope):
            try:
                scope[TENANT] = tenant = self._tenant(scope)
                scope[RECORD].tenant = tenant.name
            except ApiError as error:
                return await error.to_response()(scope, receive, send)
        return await self.app(scope, receive, send)

    def _open(self, scope: Scope) -> bool:
        return scope["path"] in _OPEN or scope["method"] == "OPTIONS"

    def _tenant(self, scope: Scope) -> Tenant:
        key = _presented(Headers(scope=scope))
        if key is None:
            raise _refused("give your API key: the header Authorization: Bearer KEY")
        tenant = self.keys.find(key)
        if tenant is None:
            raise _refused("this API key is not known here")
        if scope["path"] in _OPERATORS and not tenant.operator:
            raise ApiError(403, "this API key may not read metrics", code="not_an_operator")
        return tenant


def _presented(headers: Headers) -> str | None:
    """The key of OpenAI's header, or of Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def _refused(told: str) -> ApiError:
    return ApiError(401, told, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
