"""The compression knob of one request, parsed and validated.

The knob is a flat JSON object (SGLang carries it as ``custom_params["kv_compression"]``,
whose nested values must be scalars)::

    {"rate": 8}                                  KVs before / KVs after, 1 means off
    {"budget": 1024}                             mean KVs kept per head
    {"rate": 8, "policy": "snapkv"}              a preset
    {"rate": 8, "scorer": "attention-window", "apportioner": "uniform"}
    {"rate": 8, "policy": "snapkv", "window": 16}         and its parameters
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_kvc.spec import checks
from sgl_kvc.spec.catalogue import Parameter, methods
from sgl_kvc.spec.compression import (
    CHOICES,
    FIELDS,
    INTEGERS,
    MAX_RATE,
    ON_PRESSURE,
    SWITCHES,
    CompressionSpec,
)
from sgl_kvc.spec.errors import SpecError
from sgl_kvc.spec.presets import (
    MIN_RECENT,
    PRESETS,
    Preset,
    default_policy,
)


def parse(knob: Any, *, max_rate: float = MAX_RATE) -> CompressionSpec:
    """Turn the JSON value of ``kv_compression`` into a spec.

    Parameters
    ----------
    knob : the JSON value; None means off.
    max_rate : the server's ceiling; higher rates are refused.

    Raises
    ------
    SpecError : naming the field and the fix.
    """
    if knob is None:
        return OFF
    if not isinstance(knob, Mapping):
        raise SpecError("", 'must be an object such as {"rate": 8}, or null')
    given = {str(key): value for key, value in knob.items() if value is not None}
    values = _policy(given)
    values["parameters"] = _parameters(knob, values)
    sizes = [name for name in ("rate", ON_PRESSURE, "budget") if name in given]
    if len(sizes) > 1:
        raise SpecError(sizes[-1], f"give either {sizes[0]} or {sizes[-1]}, not both")
    if not sizes:
        raise SpecError("rate", "one of rate, on_pressure and budget is required")
    if sizes != ["budget"]:
        (field,) = sizes
        values["rate"] = parse_rate(given[field], max_rate=max_rate, field=field)
        values["on_pressure"] = field == ON_PRESSURE and values["rate"] > 1
        if "max_rate" in given:
            problem = f"bounds what a budget comes to; leave it out beside {field}"
            raise SpecError("max_rate", problem)
    else:
        asked = given.get("max_rate", max_rate)
        values["max_rate"] = parse_rate(asked, max_rate=max_rate, field="max_rate")
    for name, (low, high) in INTEGERS.items():
        if name in given:
            values[name] = checks.integer(name, given[name], low, high)
    for name in SWITCHES:
        if name in given:
            checks.one_of(name, given[name], [False, True])
            values[name] = given[name]
    for name, choices in CHOICES.items():
        if name in given:
            checks.one_of(name, given[name], list(choices))
            values[name] = given[name]
    if "question" in given and values.get("question_tokens"):
        raise SpecError("question", "give either question or question_tokens, not both")
    if values.get("reuse", "full") != "full":
        _check_reuse(values)
    if values.get("on_pressure"):
        _check_on_pressure(values)
    if values.get("prefill_block"):
        _check_prefill_block(values)
    if values.get("recompress_every"):
        if values.get("explain"):
            problem = "tells what was kept of the prompt; leave it out beside recompress_every"
            raise SpecError("explain", problem)
        for family in ("scorer", "apportioner"):
            if not methods(f"{family}s")[values[family]].continual:
                able = ", ".join(m.name for m in methods(f"{family}s").values() if m.continual)
                problem = f"{family} {values[family]} cannot go on during decode; {able} can"
                raise SpecError("recompress_every", problem)
    if values["recent"] is None:
        values["recent"] = max(values["parameters"].get("window", 1), MIN_RECENT)
    return CompressionSpec(**values)


def _check_on_pressure(values: Mapping[str, Any]) -> None:
    """Raise SpecError beside what says by itself when a request is compressed."""
    for field in ("question", "question_tokens"):
        if values.get(field):
            raise SpecError(ON_PRESSURE, f"leaves the time open, and {field} says it")
    scorer = methods("scorers")[values["scorer"]]
    if values.get("recompress_every") and scorer.continual == "rescored":
        problem = f"scorer {scorer.name} has to know beforehand when it compresses again"
        raise SpecError("recompress_every", problem)
    if values.get("reuse", "full") != "full":
        raise SpecError(ON_PRESSURE, "leaves nothing compressed for a next turn")


def _check_reuse(values: Mapping[str, Any]) -> None:
    """Raise SpecError where nothing compressed can be compressed again after prefill."""
    for field in ("question", "question_tokens", "recompress_every", "explain"):
        if values.get(field):
            raise SpecError("reuse", f"compressed turns are for requests without {field}")
    method = methods("scorers")[values["scorer"]]
    if method.all_queries or method.continual != "attention":
        problem = f"scorer {method.name} cannot score what a turn before has left"
        raise SpecError("reuse", problem)


def _check_prefill_block(values: Mapping[str, Any]) -> None:
    """Raise SpecError where a prompt cannot be compressed while it comes in."""
    for field in ("recompress_every", "explain", ON_PRESSURE):
        if values.get(field):
            raise SpecError("prefill_block", f"is for requests without {field}")
    if values.get("reuse", "full") != "full":
        raise SpecError("prefill_block", "is for requests that do not begin with compressed turns")
    for family in ("scorers", "apportioners"):
        method = methods(family)[values[family[:-1]]]
        if not method.blockwise:
            able = ", ".join(each.name for each in methods(family).values() if each.blockwise)
            problem = f"{family[:-1]} {method.name} needs the whole prompt at once; {able} do not"
            raise SpecError("prefill_block", problem)
    window = values["parameters"].get("window", 1)
    if values["prefill_block"] < window:
        raise SpecError("prefill_block", f"must be at least the window ({window})")


def parse_rate(value: Any, *, max_rate: float = MAX_RATE, field: str = "rate") -> float:
    """A rate in [1, max_rate]; raises SpecError otherwise. JSON numbers only."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        problem = f"must be a finite number, KVs before / KVs after (got {checks.short(value)})"
        raise SpecError(field, problem)
    if value < 1:
        raise SpecError(field, f"must be at least 1, which means off (got {checks.short(value)})")
    if value > max_rate:
        problem = f"must be at most {max_rate:g} on this server (got {checks.short(value)})"
        raise SpecError(field, problem)
    return float(value)


def _policy(given: Mapping[str, Any]) -> dict[str, Any]:
    named = [key for key in ("scorer", "apportioner") if key in given]
    if "policy" in given and named:
        raise SpecError(named[0], "give either policy or scorer and apportioner, not both")
    if len(named) == 1:
        missing = "apportioner" if named == ["scorer"] else "scorer"
        raise SpecError(missing, f"is required beside {named[0]}")
    if named:
        for key in named:
            checks.one_of(key, given[key], sorted(methods(f"{key}s")))
        scorer, apportioner = given["scorer"], given["apportioner"]
        name, preset = f"{scorer}+{apportioner}", Preset(scorer, apportioner, "", "")
    else:
        fields = ("question_tokens", "question", "prefill_block")
        apart = any(given.get(field) for field in fields)
        name = given.get("policy", default_policy(apart))
        checks.one_of("policy", name, sorted(PRESETS))
        preset = PRESETS[name]
    used = ("scorer", "apportioner", "parameters", "sinks", "recent")
    return {"policy": name} | {field: getattr(preset, field) for field in used}


def _parameters(knob: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the policy in `values`: the knob's, the preset's, the methods' own."""
    known = policy_parameters(values["scorer"], values["apportioner"])
    for key in knob:
        if key not in FIELDS and key not in known:
            names = ", ".join([*FIELDS, *known])
            raise SpecError(str(key), f"unknown field; for this policy they are {names}")
    chosen = {name: parameter.default for name, parameter in known.items()} | values["parameters"]
    for name, parameter in known.items():
        if knob.get(name) is not None:
            chosen[name] = checks.parameter_value(parameter, knob[name])
    return chosen


def policy_parameters(scorer: str, apportioner: str) -> dict[str, Parameter]:
    """What a scorer and an apportioner can be told, by name."""
    return dict(
        methods("scorers")[scorer].parameters | methods("apportioners")[apportioner].parameters
    )


#: What a request without a knob gets.
OFF = parse({"rate": 1})
