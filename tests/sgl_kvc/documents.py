"""Requests with a document and a question apart."""

from __future__ import annotations

from sglang.srt.mem_cache.common import release_kv_cache

from tests.sgl_kvc.lives import World
from tests.sgl_kvc.test_request import run

KNOB = {"rate": 4, "policy": "kv-compress", "min_tokens": 0, "sinks": 1, "recent": 2, "window": 2}
DOCUMENT, SEGMENT = list(range(100, 132)), 2  # blocks of the segment; 8 of the document


def apart(question: list[int], **knob) -> dict:
    return KNOB | {"question_tokens": len(question)} | knob


def ask(world: World, question: list[int], document: list[int] = DOCUMENT, **knob):
    return run(world, document + question, apart(question, **knob))


def cached(world: World, question: list[int], document: list[int] = DOCUMENT, **knob) -> int:
    """Tokens of the prompt that such a request would begin with."""
    req = world.request(document + question, apart(question, **knob))
    req.init_next_round_input(world.cache)
    return len(req.prefix_indices)


def end(world: World, req, **how) -> None:
    world.live.remove(req)
    release_kv_cache(req, world.cache, **how)
