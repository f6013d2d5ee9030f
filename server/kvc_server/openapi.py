"""The OpenAPI document of the gateway, for `GET /openapi.json`.

What the worker takes besides passes through; each body says so (`additionalProperties`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kvc_server import elastic, routes
from sgl_kvc import __version__
from sgl_kvc.spec import (
    CHOICES,
    CUSTOM_PARAM,
    FIELDS,
    INTEGERS,
    MAX_RATE,
    ON_PRESSURE,
    PRESETS,
    SWITCHES,
    Parameter,
    methods,
)

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_TRUTH: Schema = {"type": "boolean"}
_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": _TEXT, "content": {}},
    },
}
_TEXTS: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
_SAMPLING: Schema = {"temperature": {"type": "number", "minimum": 0}, "stream": _TRUTH}
#: Of each path with a body: what it is for, the fields it needs, and others worth telling.
_BODIES: Mapping[str, tuple[str, Schema, Schema]] = {
    "/v1/chat/completions": (
        "Answer a chat", {"messages": _MESSAGES},
        {"model": _TEXT, "max_tokens": _COUNT, "n": _COUNT, **_SAMPLING}),
    "/v1/completions": (
        "Continue a text", {"prompt": _TEXTS},
        {"model": _TEXT, "max_tokens": _COUNT, "n": _COUNT, "echo": _TRUTH, **_SAMPLING}),
    "/v1/responses": (
        "Answer in OpenAI's Responses API", {"input": {}},
        {"model": _TEXT, "instructions": _TEXT, "max_output_tokens": _COUNT, **_SAMPLING}),
    "/v1/messages": (
        "Answer in Anthropic's Messages API",
        {"model": _TEXT, "messages": _MESSAGES, "max_tokens": _COUNT}, {"system": {}, **_SAMPLING}),
    "/generate": (
        "SGLang's own endpoint", {},
        {"text": _TEXTS, "input_ids": {"type": "array"}, "stream": _TRUTH,
         "sampling_params": {"type": ["object", "array"]}}),
    "/v1/embeddings": ("Embed texts", {"input": {}}, {"model": _TEXT}),
    "/v1/classify": ("Classify texts", {"input": {}}, {"model": _TEXT}),
    "/v1/score": ("Score items against a query", {"query": {}, "items": {}}, {"model": _TEXT}),
    "/v1/rerank": ("Order documents", {"query": _TEXT, "documents": {"type": "array"}}, {}),
    "/v1/messages/count_tokens": (
        "Count a chat's tokens", {"model": _TEXT, "messages": _MESSAGES}, {}),
    "/v1/tokenize": ("Tokens of a text or a chat", {}, {"prompt": {}, "messages": _MESSAGES}),
    "/v1/detokenize": ("Text of tokens", {"tokens": {"type": "array"}}, {}),
    routes.DOCUMENTS: (
        "Compress a document once and keep it for many readers", {},
        {"messages": _MESSAGES, "text": _TEXT, "input_ids": {"type": "array"},
         "ttl_s": {"type": "number"}, "cache_salt": _TEXT}),
}  # fmt: skip
_ALSO = {"/tokenize": "/v1/tokenize", "/detokenize": "/v1/detokenize"}
_READ = {
    routes.MODELS: "The worker's models",
    "/v1/models/{model}": "One of them",
    routes.MODEL_INFO: "The worker's model, in SGLang's words",
    routes.GET_MODEL_INFO: "The same, for sglang.RuntimeEndpoint",
    routes.RESPONSE: "A response that was stored",
    "/v1/kv_policies": "What a request can ask for in kv_compression",
    "/live": "Whether the gateway lives",
    "/health": "Whether requests are served",
    "/readiness": "Whether requests are served",
    "/metrics": "Metrics in Prometheus' text format",
    "/openapi.json": "This document",
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@functools.cache
def document() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    paths: dict[str, Any] = {path: {"post": _post(path)} for path in (*_BODIES, *_ALSO)}
    for path, summary in _READ.items():
        paths[path] = {"get": _operation(summary, path)}
    paths[routes.DOCUMENTS]["get"] = _operation("What is stored compressed", routes.DOCUMENTS)
    released = _operation("Let a kept document be evicted like others", routes.DOCUMENT)
    paths[routes.DOCUMENT] = {"delete": released}
    paths[routes.CANCEL] = {
        "post": _operation("Cancel a response in the background", routes.CANCEL)
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "sgl-kvc", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {CUSTOM_PARAM: knob_schema(), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def knob_schema() -> Schema:
    """The knob as JSON Schema: what it refuses is refused, though not all that is refused."""
    fields: Schema = {name: {} for name in FIELDS}
    for name in ("rate", ON_PRESSURE, "max_rate"):
        fields[name] = {"type": "number", "minimum": 1, "maximum": MAX_RATE}
    rate = fields["max_rate"]
    fields[elastic.FIELD] = {"type": "object", "required": ["max_rate"],
                             "properties": {"max_rate": rate}, "additionalProperties": False}
    for name, (low, high) in INTEGERS.items():
        fields[name] = {"type": "integer", "minimum": low, "maximum": high}
    fields |= dict.fromkeys(SWITCHES, _TRUTH)
    fields |= {name: {"enum": list(choices)} for name, choices in CHOICES.items()}
    fields["policy"] = {"enum": sorted(PRESETS)}
    for field, family in (("scorer", "scorers"), ("apportioner", "apportioners")):
        fields[field] = {"enum": sorted(methods(family))}
    for name, known in _parameters().items():
        fields[name] = {"anyOf": known, "description": "; ".join(
            dict.fromkeys(each.pop("description") for each in known)
        )}  # fmt: skip
    return {
        "anyOf": [
            {"type": "null"},
            {"type": "object", "properties": fields, "additionalProperties": False},
        ]
    }


def _parameters() -> dict[str, list[Schema]]:
    """Of every parameter's name, what each method that has it takes."""
    found: dict[str, list[Schema]] = {}
    for family in ("scorers", "apportioners"):
        for method in methods(family).values():
            for name, parameter in method.parameters.items():
                found.setdefault(name, []).append(_parameter(parameter))
    return found


def _parameter(parameter: Parameter) -> Schema:
    about = {"description": parameter.about}
    if parameter.choices:
        return {"enum": list(parameter.choices), **about}
    kind = "integer" if parameter.whole else "number"
    return {"type": kind, "minimum": parameter.min, "maximum": parameter.max, **about}


def _post(path: str) -> Schema:
    summary, needed, others = _BODIES[_ALSO.get(path, path)]
    fields = {**needed, **others}
    knobbed = path in routes.GENERATING or path == routes.DOCUMENTS
    if knobbed:
        fields[CUSTOM_PARAM] = {"$ref": f"#/components/schemas/{CUSTOM_PARAM}"}
    body = {"type": "object", "properties": fields, "required": list(needed),
            "additionalProperties": path != routes.DOCUMENTS}  # fmt: skip
    content = {"application/json": {"schema": body}}
    operation = _operation(summary, path)
    if knobbed:
        operation["parameters"] = [
            {"in": "header", "name": "X-KV-Compression-Rate", "schema": {"type": "number"},
             "description": "the rate, instead of kv_compression"},
        ]  # fmt: skip
    return operation | {"requestBody": {"required": True, "content": content}}


def _operation(summary: str, path: str) -> Schema:
    answers = {
        "200": {"description": "the worker's answer, with kv_compression if it generated"},
        "default": {
            "description": "an error",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        },
    }
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    parameters = [{"in": "path", "name": name, "required": True, "schema": _TEXT} for name in names]
    return {
        "summary": summary,
        "responses": answers,
        **({"parameters": parameters} if names else {}),
    }
