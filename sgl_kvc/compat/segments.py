"""The stored segments, seen from outside the scheduler: listed, released, and never in the way.

SGLang's two messages about its internal state carry it: both come at once, however long the queue
is, and to every rank.
"""

from __future__ import annotations

import logging
from typing import Any

from sgl_kvc.compat import BACKEND
from sgl_kvc.compat.hook import Hook

logger = logging.getLogger(__name__)

#: What the segments are called in ``/server_info``, and what a key that releases one begins with.
LISTED, RELEASE = "kv_cache", "kv_cache_release/"


def list_segments(original, scheduler, request) -> Any:
    """``Scheduler.get_internal_state``: with the stored segments."""
    output = original(scheduler, request)
    listed = getattr(scheduler.tree_cache, "list_segments", None)
    if listed is not None:
        output.internal_state[LISTED] = listed()
    return output


def release_segment(original, scheduler, request) -> Any:
    """``Scheduler.set_internal_state``: a key that names a pinned segment releases it.

    `updated` says whether it was pinned.
    """
    names = [key.removeprefix(RELEASE) for key in request.server_args if key.startswith(RELEASE)]
    if not names or scheduler.server_args.attention_backend != BACKEND:
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    done = [scheduler.tree_cache.pins.release(name) for name in names]
    return SetInternalStateReqOutput(updated=all(done))


def make_way(running, cache) -> None:
    """Nothing runs, and nobody who waits could enter: release what was pinned first.

    Requests may be as long as the pool, and would wait for ever. `running` may be filled again.
    """
    name = cache.pins.release_oldest()
    if name is not None:
        running.batch_is_full = False
        logger.warning("released the pinned segment %s: a request does not fit beside it", name)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

HOOKS = (
    Hook(f"{_SCHEDULER}.get_internal_state", "AROUND", list_segments,
         "no message of SGLang's carries what a prefix cache holds"),
    Hook(f"{_SCHEDULER}.set_internal_state", "AROUND", release_segment,
         "no message of SGLang's releases an entry of its prefix cache"),
)
