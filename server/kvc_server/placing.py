"""A request's body as the worker should get it: the knob at its place, and what its key decides."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from anyio import to_process

from kvc_server import knob
from kvc_server.demand import Demand, demand_of
from kvc_server.elastic import Elastic
from kvc_server.errors import ApiError
from kvc_server.routes import GENERATING, Place
from kvc_server.settings import Settings
from kvc_server.tenants import Tenant
from sgl_kvc.spec import CUSTOM_PARAM, KNOB_HEADER, CompressionSpec, routed

#: Larger bodies are parsed in a process of their own: in this one nobody else would be served
#: meanwhile, in whichever thread. Below, that takes less than the way there.
BIG_BODY_BYTES = 256 * 1024

Added = list[tuple[bytes, bytes]]
#: Fields that keep prompts apart in the prefix cache.
_SPACES = ("cache_salt", "extra_key", "lora_path", "model")


@dataclasses.dataclass(frozen=True)
class Placed:
    """A request as the worker should get it.

    Attributes
    ----------
    added : headers to add.
    demand : what it may take; None where nobody needs to know.
    specs : its knob as it was asked for, or that of each of its prompts.
    elastic : to which its rate may be raised; None leaves it as it is.
    space : what keeps its prompts apart from others' in the prefix cache.
    """

    content: bytes
    added: Added
    demand: Demand | None = None
    specs: tuple[CompressionSpec, ...] = ()
    elastic: Elastic | None = None
    space: tuple[str, ...] = ()


async def place_body(body: bytearray, *request: Any) -> Placed:
    """`place_bytes`, where nobody else waits for it."""
    if len(body) <= BIG_BODY_BYTES:
        return place_bytes(body, *request)
    return await to_process.run_sync(place_bytes, body, *request, cancellable=True)


def place_bytes(
    body: bytes | bytearray,
    path: str,
    header: list[str],
    behind_router: str | None,
    settings: Settings,
    tenant: Tenant | None = None,
    rate: float | None = None,
) -> Placed:
    """A request's JSON text to the worker's: the knob at its place, and what its key decides.

    Parameters
    ----------
    path : of an endpoint that generates.
    header : the values of `knob.HEADER`.
    behind_router : that of the header by which a client of a router before us tells its knob; it
        counts where the request has no other.
    rate : to which the knob's is raised; None leaves it as it is.
    """
    content = json_object(body)
    place, demand = GENERATING[path], None
    if behind_router is not None and not header and not _has_knob(content):
        content[CUSTOM_PARAM] = _json(behind_router)
    limited = tenant is not None and tenant.tokens_per_minute is not None
    if tenant is not None:
        content = _decided(content, tenant)
    if limited or settings.room is not None:
        demand = demand_of(path, content)
    if place is Place.HEADER:
        content, given = knob.take(content, header, settings)
        knobs = [given]
    else:
        native = place is Place.SAMPLING_PARAMS
        content = knob.place(content, header, native=native, settings=settings)
        holder = content["sampling_params"] if native else content
        holders = holder if isinstance(holder, list) else [holder]
        each = [holder["custom_params"][CUSTOM_PARAM] for holder in holders]
        knobs = list({id(one): one for one in each}.values())  # one, if it stands for all
    specs, elastic = knob.settle(knobs, rate)
    added: Added = []
    if len(knobs) == 1:
        text = json.dumps(knobs[0])
        added = carried(KNOB_HEADER, text, settings, place is Place.HEADER)
    if content.get("background"):  # its answer comes later, and tells no report
        specs, elastic = (), None
    space = tuple(str(content.get(name)) for name in _SPACES)
    return Placed(json.dumps(content).encode(), added, demand, specs, elastic, space)


def carried(name: str, value: str, settings: Settings, direct: bool = True) -> Added:
    """A header for the plugin in the worker; what is no worker of ours may be a router before it.

    Parameters
    ----------
    name : by which the plugin knows it, if `direct`.
    """
    names = [name] * direct + [routed(name)] * (settings.worker_url is not None)
    return [(each.encode(), value.encode()) for each in names]


def _has_knob(content: dict[str, Any]) -> bool:
    custom = content.get("custom_params")
    return CUSTOM_PARAM in content or (isinstance(custom, dict) and CUSTOM_PARAM in custom)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        name = routed(KNOB_HEADER)
        raise ApiError(400, f"{name}: must be JSON", param=name, code="invalid_json") from None


def _decided(body: dict[str, Any], tenant: Tenant) -> dict[str, Any]:
    """The body without what its key decides instead: priority, and the id by which it is stored."""
    kept = {name: value for name, value in body.items() if name not in ("priority", "request_id")}
    return kept if tenant.priority is None else kept | {"priority": tenant.priority}


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """The object that a body is. Raises ApiError 400."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return content
