"""What a request can ask for: every policy, scorer and apportioner as JSON. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_kvc.spec import (
    DEFAULT_POLICY,
    DEFAULT_QUESTION_APART,
    PRESETS,
    Method,
    Parameter,
    methods,
    parse,
    policy_parameters,
)


def catalogue() -> dict[str, Any]:
    """The body of ``GET /v1/kv_policies`` and of ``sgl-kvc policies --json`` (docs/http.md)."""
    return {
        "default": DEFAULT_POLICY,
        "default_with_question_tokens": DEFAULT_QUESTION_APART,
        "policies": [_policy(name) for name in PRESETS],
        "scorers": [_method(method) for method in methods("scorers").values()],
        "apportioners": [_method(method) for method in methods("apportioners").values()],
    }


def _policy(name: str) -> dict[str, Any]:
    preset, spec = PRESETS[name], parse({"rate": 2, "policy": name})
    scorer = methods("scorers")[preset.scorer]
    apportioner = methods("apportioners")[preset.apportioner]
    return {
        "name": name,
        "source": preset.source,
        "differs": preset.differs or None,
        "scorer": preset.scorer,
        "apportioner": preset.apportioner,
        "sinks": spec.sinks,
        "recent": spec.recent,
        "all_queries": scorer.all_queries,
        "continual": spec.continual,
        "blockwise": scorer.blockwise and apportioner.blockwise,
        "needs": sorted({*scorer.needs, *apportioner.needs}),
        "parameters": _parameters(
            policy_parameters(preset.scorer, preset.apportioner), spec.parameters
        ),
    }


def _method(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "source": method.source,
        "all_queries": method.all_queries,
        "continual": method.continual or (None if method.family == "scorers" else False),
        "blockwise": method.blockwise,
        "needs": sorted(method.needs),
        "parameters": _parameters(method.parameters, {}),
    }


def _parameters(
    known: Mapping[str, Parameter], chosen: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """By name; the default is what is `chosen` there, the method's own otherwise."""
    return {
        name: parameter.to_json() | {"default": chosen.get(name, parameter.default)}
        for name, parameter in known.items()
    }
