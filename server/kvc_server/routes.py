"""Which paths there are, and what becomes of the knob on each."""

from __future__ import annotations

import enum
import re

from kvc_server.errors import ApiError


class Place(enum.Enum):
    """Where the worker looks for a request's knob."""

    CUSTOM_PARAMS = "the body's custom_params"
    SAMPLING_PARAMS = "custom_params of the body's sampling_params"
    HEADER = "the header KNOB_HEADER, as the body has no place for it"


#: Endpoints that generate.
GENERATING = {
    "/v1/chat/completions": Place.CUSTOM_PARAMS,
    "/v1/completions": Place.CUSTOM_PARAMS,
    "/v1/responses": Place.HEADER,
    "/v1/messages": Place.HEADER,
    "/generate": Place.SAMPLING_PARAMS,
}
#: Endpoints of the worker's whose requests are passed on as they come.
PASSED = (
    "/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank", "/v1/messages/count_tokens",
    "/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize",
)  # fmt: skip
MODELS = "/v1/models"
MODEL = "/v1/models/{model:path}"
#: The worker's, by its name and by the one that an `sglang.RuntimeEndpoint` asks for.
MODEL_INFO, GET_MODEL_INFO = "/model_info", "/get_model_info"
RESPONSE = "/v1/responses/{response_id}"
CANCEL = "/v1/responses/{response_id}/cancel"
#: Documents that are kept, and one of them.
DOCUMENTS = "/v1/kv_cache"
DOCUMENT = "/v1/kv_cache/{name}"
#: Of the worker's, what the gateway asks it for itself; the last is its operator's.
TOKENIZE, SERVER_INFO, SET_STATE = "/v1/tokenize", "/server_info", "/set_internal_state"
#: What SGLang's router calls the first, of one of its workers; and its list of them.
ROUTED_SERVER_INFO, ROUTED_WORKERS = "/get_server_info", "/workers"
#: What the gateway answers by itself.
OWN = ("/v1/kv_policies", "/live", "/health", "/readiness", "/metrics", "/openapi.json")

#: What metrics and logs call a request's path; every other path is "other".
NAMED = frozenset({*GENERATING, *PASSED, MODELS, MODEL_INFO, GET_MODEL_INFO, DOCUMENTS, *OWN})
_BY_PREFIX = {
    "/v1/models/": MODEL.replace(":path", ""),
    "/v1/responses/": RESPONSE,
    "/v1/kv_cache/": DOCUMENT,
}
_RESPONSE_ID = re.compile(r"resp_[\w-]{1,128}", re.ASCII)


def endpoint_name(path: str) -> str:
    """A path as a label of metrics: one of few, whatever a client asks for."""
    if path in NAMED:
        return path
    return next((name for prefix, name in _BY_PREFIX.items() if path.startswith(prefix)), "other")


def response_path(response_id: str, suffix: str = "") -> str:
    """The worker's path of a stored response. Raises ApiError 404 for what cannot be an id."""
    if not _RESPONSE_ID.fullmatch(response_id):
        told = "there is no such response; an id looks like resp_0123abcd"
        raise ApiError(404, told, param="response_id", code="response_not_found")
    return f"/v1/responses/{response_id}{suffix}"
