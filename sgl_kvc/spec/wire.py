"""Names by which the gateway and the plugin in its worker find what they tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Header of a request to the worker that holds the knob as JSON, for endpoints whose body has no
#: place for it. The gateway never passes on a client's own.
KNOB_HEADER = "x-kv-compression"
#: Header of a request to the worker: where its prompt is cached, apart from all others'.
NAMESPACE_HEADER = "x-kv-namespace"
_FORWARDED = "x-request-id-"  # the one prefix of which SGLang's routers forward every header


def routed(name: str) -> str:
    """What a header above is called where a router may stand before the worker.

    `sglang-router` drops a knob in the body of chats and of ``/generate``; it and `smg` drop
    headers, but for these.
    """
    return _FORWARDED + name.removeprefix("x-")


#: SGLang's arguments that are keys, and the variables of the worker's environment they come in.
WORKER_KEYS: Mapping[str, str] = MappingProxyType(
    {"api_key": "SGL_KVC_API_KEY", "admin_api_key": "SGL_KVC_ADMIN_API_KEY"}
)
