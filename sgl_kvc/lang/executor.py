"""SGLang's executor of programs, which carries the knob of every expression to the backend."""

from __future__ import annotations

from typing import Any

from sglang.lang import interpreter

from sgl_kvc.compat.check import check_symbols
from sgl_kvc.compat.symbols import FRONTEND
from sgl_kvc.lang.endpoint import RuntimeEndpoint
from sgl_kvc.lang.knob import bound, current, has_knob, in_force, knob_of


class StreamExecutor(interpreter.StreamExecutor):
    """Executes a program's expressions in another thread, each under its own knob.

    That thread has the context in which the program began, so the knob of a context inside the
    program is put on the expression when it is added.

    Attributes
    ----------
    kvc_shared : characters of the text that the branches of its fork have in common.
    """

    kvc_shared = 0

    def submit(self, expr: Any) -> None:
        """Raises RuntimeError where the backend would drop a knob."""
        knob = current()
        if knob is not None:
            expr = bound(expr, knob)
        if has_knob(expr) and not isinstance(self.backend, RuntimeEndpoint):
            raise RuntimeError(
                f"the backend {type(self.backend).__name__} cannot send kv_compression; "
                "use sgl_kvc.lang.RuntimeEndpoint or sgl_kvc.lang.engine.EngineBackend"
            )
        super().submit(expr)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> list[Any]:
        branches = super().fork(size, position_ids_offset)
        for branch in branches:
            branch.kvc_shared = len(self.text_) if size > 1 else self.kvc_shared
        return branches

    def _execute(self, other: Any) -> None:
        knob = knob_of(other)
        if knob is None:
            super()._execute(other)
            return
        with in_force(knob):
            super()._execute(other)


def install() -> None:
    """Have SGLang run programs in our executor. Raises IncompatibleError.

    There is no seam: SGLang makes executors by this name, and hands a backend neither the
    expression nor its context.
    """
    check_symbols(FRONTEND)
    interpreter.StreamExecutor = StreamExecutor
