"""What programs are written with: the context, and `gen` and `select` with a knob of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sglang.lang import api
from sglang.lang.ir import SglExpr

from sgl_kvc.lang.knob import NOT_GIVEN, Knob, checked, in_force


@contextlib.contextmanager
def kv_compression(**knob: Any) -> Iterator[None]:
    """Compress what is generated in this context: ``with kv_compression(rate=8):``.

    Around ``program.run()`` or ``run_batch()`` it holds for the whole program; inside a program,
    for what is added to the state in it. The innermost counts.

    Parameters
    ----------
    **knob : the fields of ``kv_compression`` (docs/http.md); ``rate=1`` is off, whatever the
        server's default.

    Raises
    ------
    SpecError : naming the field that cannot be used.
    """
    with in_force(checked(knob)):
        yield


def gen(*args: Any, kv_compression: Knob | None = NOT_GIVEN, **kwargs: Any) -> SglExpr:
    """``sglang.gen`` with a knob of its own, which counts before every context; None is off."""
    return _with_knob(api.gen(*args, **kwargs), kv_compression)


def select(*args: Any, kv_compression: Knob | None = NOT_GIVEN, **kwargs: Any) -> SglExpr:
    """``sglang.select`` with a knob of its own; the choices are read after compression."""
    return _with_knob(api.select(*args, **kwargs), kv_compression)


def _with_knob(expr: SglExpr, knob: Knob | None) -> SglExpr:
    if knob is not NOT_GIVEN:
        expr.kvc_knob = checked(knob)
    return expr
