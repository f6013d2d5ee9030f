"""An operator's request that fails is answered; SGLang 0.5.17 would end the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from sgl_kvc.compat.hook import Hook

logger = logging.getLogger(__name__)


def answer_failures(_result: Any, scheduler) -> None:
    """``Scheduler.init_request_dispatcher``: an exception in a handler becomes its answer.

    The answer says ``success: false`` and the reason. A few answers of SGLang's have no fields;
    then only the log says it. Requests with no answer (a client's prompts) are left alone.
    """
    from sglang.srt.managers import io_struct

    handlers = scheduler._request_dispatcher._mapping
    for request, handle in handlers.items():
        name = request.__name__.removesuffix("Input") + "Output"
        answer = getattr(io_struct, name, None)
        if answer is None:
            continue
        if {"success", "message"} <= set(answer.__struct_fields__):
            handlers[request] = _answering(handle, partial(answer, success=False))
        elif not answer.__annotations__:
            handlers[request] = _answering(handle, lambda message, answer=answer: answer())


def _answering(handle: Callable[[Any], Any], answer: Callable[..., Any]) -> Callable[[Any], Any]:
    @wraps(handle)
    def guarded(request: Any) -> Any:
        try:
            return handle(request)
        except Exception as error:
            logger.exception("%s failed", type(request).__name__)
            return answer(message=str(error) or repr(error))

    return guarded


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
        "AFTER",
        answer_failures,
        "an exception in any handler ends the scheduler, and everybody's requests with it",
    ),
)
