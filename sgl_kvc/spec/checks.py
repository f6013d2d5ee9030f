"""Checks of single JSON values. Each raises SpecError naming the field."""

from __future__ import annotations

from typing import Any

from sgl_kvc.spec.catalogue import Parameter
from sgl_kvc.spec.errors import SpecError


def parameter_value(parameter: Parameter, value: Any) -> Any:
    """`value` if the parameter takes it."""
    if parameter.choices:
        one_of(parameter.name, value, list(parameter.choices))
        return value
    low, high = parameter.min, parameter.max
    assert low is not None  # as there are no choices
    assert high is not None
    if parameter.whole:
        whole = integer(parameter.name, value, low, high)
        if (whole - low) % parameter.step:
            problem = f"must be {low} plus a multiple of {parameter.step} (got {whole})"
            raise SpecError(parameter.name, problem)
        return whole
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        problem = f"must be a number from {low:g} to {high:g} (got {short(value)})"
        raise SpecError(parameter.name, problem)
    return float(value)


def one_of(field: str, value: Any, known: list[Any]) -> None:
    """Refuse a value that is not among `known`; 0 and 1 are not false and true."""
    if not any(value is one or (isinstance(value, str) and value == one) for one in known):
        names = ", ".join(map(str, known))
        raise SpecError(field, f"unknown {field} {short(value)}; known are {names}")


def integer(field: str, value: Any, low: float, high: float) -> int:
    """A whole number in [low, high]; 8.0 is one."""
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not low <= value <= high:
        problem = f"must be a whole number from {low} to {high} (got {short(value)})"
        raise SpecError(field, problem)
    return int(value)


def short(value: Any) -> str:
    """The value as the client gave it, cut to what fits a message."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
