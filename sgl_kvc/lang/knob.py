"""The knob that is in force where something is generated, and on an expression."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from sglang.lang.ir import SglExprList, SglGen, SglSelect

from sgl_kvc.spec import parse

Knob = Mapping[str, Any]
OFF: Knob = {"rate": 1}
#: Default of parameters whose None is off.
NOT_GIVEN: Any = object()

_current: ContextVar[Knob | None] = ContextVar("kv_compression", default=None)


def checked(knob: Knob | None) -> Knob:
    """The knob as it is sent; None is `OFF`. Raises SpecError, naming the field."""
    return OFF if knob is None or parse(knob).off else dict(knob)


def current() -> Knob | None:
    """The knob of the innermost context of this thread; None where none was said."""
    return _current.get()


@contextlib.contextmanager
def in_force(knob: Knob) -> Iterator[None]:
    """Make a `checked` knob the `current` one."""
    token = _current.set(knob)
    try:
        yield
    finally:
        _current.reset(token)


def knob_of(expr: Any) -> Knob | None:
    """The knob on one expression of a program; None where it has none."""
    return getattr(expr, "kvc_knob", None)


def has_knob(expr: Any) -> bool:
    """Whether an expression or a part of it has a knob."""
    return knob_of(expr) is not None or any(map(has_knob, getattr(expr, "expr_list", ())))


def bound(expr: Any, knob: Knob) -> Any:
    """`expr` with `knob` on all of it that generates and has none; `expr` is not changed.

    One expression may be added to states in different contexts.
    """
    if isinstance(expr, SglExprList):
        return SglExprList([bound(each, knob) for each in expr.expr_list])
    if isinstance(expr, (SglGen, SglSelect)) and knob_of(expr) is None:
        expr = copy.copy(expr)
        expr.kvc_knob = knob
    return expr
