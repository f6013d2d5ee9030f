"""When the row of a request that ends becomes uncompressed again."""

from __future__ import annotations

import contextlib

import pytest
from sglang.srt.mem_cache.common import release_kv_cache

from tests.sgl_kvc.lives import World
from tests.sgl_kvc.test_radix import GOES_ON, PLAIN, prompt, server_args  # noqa: F401
from tests.sgl_kvc.test_request import run


@pytest.mark.parametrize("knob", [None, PLAIN, GOES_ON])
def test_rows_are_cleared_behind_the_forward_under_way(knob, monkeypatch):
    """It may still read them. A row that was never compressed makes nobody wait."""
    world, order = World(40), []
    run(world, prompt(32), knob)
    clear = world.pool.spans.clear

    @contextlib.contextmanager
    def behind_forward(*_used):
        order.append("begin")
        yield
        order.append("end")

    def note(row):
        order.append("clear")
        clear(row)

    monkeypatch.setattr(world.cache, "behind_forward", behind_forward)
    monkeypatch.setattr(world.pool.spans, "clear", note)
    release_kv_cache(world.live.pop(), world.cache)
    assert order == ([] if knob is None else ["begin", "clear", "end"])
