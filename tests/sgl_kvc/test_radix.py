"""One request at a time through the radix cache: what it takes, gives back and says.

Blocks have 4 tokens; heads keep what random scores say.
"""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request
from tests import tiny_models
from tests.sgl_kvc.lives import PAGE, World
from tests.sgl_kvc.test_request import run

PLAIN = {"rate": 4, "min_tokens": 0, "sinks": 1, "recent": 2, "window": 2, "policy": "kv-compress"}
H2O = {"rate": 4, "min_tokens": 0, "policy": "h2o"}
GOES_ON = {"budget": 8, "recompress_every": 8} | {k: v for k, v in PLAIN.items() if k != "rate"}


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


def prompt(tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + tokens))


def report(req) -> dict:
    return Request.of(req).report.to_json()


# ---------------------------------------------------------------------------- memory


@pytest.mark.parametrize("promised", [0, PAGE, 3 * PAGE])
def test_what_was_promised_is_not_given_away(promised):
    """To the block: the next decode step takes it, and raises where it is not there."""
    world = World(10)
    cache = world.cache
    cache._promised = promised
    room = 10 * PAGE - promised
    assert cache.allocate(room + PAGE) is None
    assert world.allocator.available_size() == 10 * PAGE
    slots = cache.allocate(room)
    assert len(slots) == len(slots.unique()) == room
    assert cache.allocate(PAGE) is None or not promised
    assert world.allocator.available_size() == promised


def test_what_the_tree_can_do_without_is_room():
    world = World(10)
    run(world, prompt(6 * PAGE), None)
    release_kv_cache(world.live.pop(), world.cache)
    assert world.cache.evictable_size() == 6 * PAGE
    assert world.cache.allocate(11 * PAGE) is None
    assert world.cache.evictable_size() == 6 * PAGE
    assert len(world.cache.allocate(10 * PAGE)) == 10 * PAGE


def test_a_promise_holds_for_one_step():
    world = World(40)
    req, seen = run(world, prompt(8 * PAGE), GOES_ON), []
    allocate = world.cache.allocate
    world.cache.allocate = lambda tokens: seen.append(world.cache._promised) or allocate(tokens)
    for _ in range(20):
        world.cache.compress_due(world.live, promised=7)
        world.decode()
    assert set(seen) <= {7, PAGE, 0}
    assert 7 in seen
    assert world.cache._promised == 0
    req.kv_committed_len += 9
    world.cache.allocate = None  # so it raises
    with pytest.raises(TypeError):
        world.cache.compress_due(world.live, promised=7)
    assert world.cache._promised == 0


def test_whether_memory_was_released_is_asked_once():
    """The scheduler tries waiting requests again then."""
    world = World(40)
    run(world, prompt(8 * PAGE), None)
    assert not world.cache.take_released()
    run(world, prompt(8 * PAGE, 500), PLAIN)
    assert world.cache.take_released() is True
    assert world.cache.take_released() is False
    run(world, prompt(8 * PAGE, 900), GOES_ON)
    world.cache.take_released()
    for _ in range(8):
        world.decode()
    assert not world.cache.take_released()
    world.decode()
    assert world.cache.take_released() is True


# ---------------------------------------------------------------------------- whether


@pytest.mark.parametrize(
    ("tokens", "knob", "reason"),
    [
        (1, PLAIN, "no token is decoded"),
        (2, PLAIN, None),
        (1, PLAIN | {"question_tokens": 8}, None),
        (0, H2O, None),
        (0, PLAIN, "no token is decoded"),
        (1, H2O, "no token is decoded"),
    ],
)
def test_who_would_read_what_is_kept(tokens, knob, reason):
    """Decode, the question, or copies of the prompt that come next."""
    world = World(40)
    req = world.request(prompt(8 * PAGE), knob, max_new_tokens=tokens)
    world.admit(req)
    assert Request.of(req).unusable is None
    skipped = Request.of(req).extent.skipped
    assert skipped is None if reason is None else reason in skipped


def test_without_a_prefix_cache_or_in_a_session_nothing_is_compressed():
    world = World(40)
    req = world.request(prompt(8 * PAGE), PLAIN)
    req.session = object()
    assert world.cache._extent(req).skipped == "the request belongs to a session"
    world.cache.disable = True
    req = world.request(prompt(8 * PAGE), PLAIN)
    assert world.cache._extent(req).skipped == "the server's prefix cache is disabled"


@pytest.mark.parametrize("question", [0, 1, 8, 31])
def test_room_before_the_cut(question):
    world = World(40)
    req = world.request(prompt(8 * PAGE), PLAIN | {"question_tokens": question})
    assert world.admit(req) == 0
    end = (32 - question) // PAGE * PAGE
    room = end if question and end > PAGE else None
    assert world.cache.room_before_cut(req) == room
    if room is not None:
        req.prefix_indices = torch.arange(end - 3)
        assert world.cache.room_before_cut(req) == 3
        req.prefix_indices = torch.arange(end)
        assert world.cache.room_before_cut(req) is None


# ---------------------------------------------------------------------------- the end


def test_a_flushed_cache_has_forgotten_everything():
    world = World(40)
    req = run(world, prompt(32), H2O)
    run(world, prompt(32, 500), GOES_ON)
    key = Request.of(req).states_key(req)
    assert world.cache.states.get(key) is not None
    world.cache.reset()
    assert world.cache.states.get(key) is None
    assert not world.cache.sharing.holders
    assert world.pool.requests == {}
    world.pool.spans.check_integrity()
    assert not world.pool.spans.is_compressed(req.req_pool_idx)


@pytest.mark.parametrize("knob", [None, PLAIN, GOES_ON])
def test_a_request_that_ends_leaves_nothing(knob):
    world = World(40)
    req = run(world, prompt(32), knob)
    for _ in range(9):
        world.decode()
    row = req.req_pool_idx
    release_kv_cache(world.live.pop(), world.cache)
    assert world.pool.requests == {}
    assert not world.cache.sharing.holders
    assert not world.pool.spans.is_compressed(row)
    assert not world.pool.spans.tracks_attention()
    assert Request.of(req).segment is None
    assert world.allocator.available_size() + world.cache.evictable_size() == world.tokens
    world.pool.spans.check_integrity()
