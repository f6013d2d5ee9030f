"""What a paused program will need is evicted after all others, and never in the way."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request
from tests import tiny_models
from tests.sgl_kvc.documents import end
from tests.sgl_kvc.test_request import run

HOLD = {"rate": 1, "hold_s": 30}
COMPRESSED = {
    "rate": 4, "policy": "kv-compress", "min_tokens": 0, "sinks": 1, "recent": 2, "window": 2,
    "reuse": "compressed", "hold_s": 30,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


def prompt(number: int, tokens: int = 32) -> list[int]:
    return [1000 * number + i for i in range(tokens)]


def ran(world, number: int, knob: dict | None, at: float = 0.0) -> None:
    """A request that comes and ends at a time."""
    world.clock = at
    end(world, run(world, prompt(number), knob), is_insert=True)


def cached(world, number: int, knob: dict | None = None) -> int:
    req = world.request([*prompt(number), 1, 2, 3], knob)
    req.init_next_round_input(world.cache)
    return len(req.prefix_indices)


def test_what_is_held_is_evicted_last(checked_lives):
    world = checked_lives.world
    for number, knob in ((1, HOLD), (2, None), (3, None)):
        ran(world, number, knob)
    world.cache.evict(EvictParams(num_tokens=64))
    assert [cached(world, number) for number in (1, 2, 3)] == [32, 0, 0]


def test_where_all_is_held_the_oldest_goes(checked_lives):
    world = checked_lives.world
    for number in (1, 2, 3):
        ran(world, number, HOLD)
    world.cache.evict(EvictParams(num_tokens=32))
    assert [cached(world, number) for number in (1, 2, 3)] == [0, 32, 32]
    world.cache.evict(EvictParams(num_tokens=64))
    assert world.cache.total_size() == 0


@pytest.mark.parametrize(("later", "kept"), [(29.0, 32), (31.0, 0)])
def test_it_ends_with_its_time(checked_lives, later, kept):
    world = checked_lives.world
    ran(world, 1, HOLD, at=100.0)
    ran(world, 2, {"rate": 1}, at=100.0 + later)
    world.cache.evict(EvictParams(num_tokens=32))
    assert cached(world, 1) == kept
    assert cached(world, 2) == 32 - kept


def test_of_a_compressed_turn_only_what_was_kept_is_held(checked_lives):
    """Not the uncompressed copy, which is larger and goes first."""
    world = checked_lives.world
    ran(world, 1, COMPRESSED)
    ran(world, 2, None)
    world.cache.evict(EvictParams(num_tokens=64))
    assert len(world.cache.segments) == 1
    assert world.cache.total_size() == 8
    assert cached(world, 1, COMPRESSED) == 32
    assert cached(world, 2) == 0


def test_of_a_segment_of_its_own_the_prompt_is_held(checked_lives):
    world = checked_lives.world
    ran(world, 1, {**COMPRESSED, "reuse": None})
    ran(world, 2, None)
    world.cache.evict(EvictParams(num_tokens=32))
    assert (cached(world, 1), cached(world, 2)) == (32, 0)


def test_a_request_that_was_aborted_holds_nothing(checked_lives):
    world = checked_lives.world
    world.live.clear()
    req = run(world, prompt(1), HOLD)
    end(world, req, is_insert=False)
    ran(world, 2, None)
    world.cache.evict(EvictParams(num_tokens=32))
    assert (cached(world, 1), cached(world, 2)) == (0, 32)


def test_time_is_what_requests_tell(checked_lives):
    """It never goes back; a request without a time tells nothing."""
    world = checked_lives.world
    ran(world, 1, {"rate": 1}, at=50.0)
    ran(world, 2, {"rate": 1}, at=40.0)
    assert world.cache.holds.now == 50.0
    req = world.request(prompt(3), None)
    assert Request.of(req).arrived is None
