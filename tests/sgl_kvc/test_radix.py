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


def test_compression_that_did_not_happen_has_released_nothing():
    world = World(60)
    run(world, prompt(32), None)
    run(world, prompt(32), None)
    req = run(world, prompt(32), PLAIN | {"rate": 2, "window": 32})
    assert "its share of the 8" in report(req)["skipped"]
    assert not world.cache.take_released()
    req = run(world, prompt(32, 500), GOES_ON)
    assert world.cache.take_released()
    world.cache.allocate = lambda tokens: None
    req.kv_committed_len += 8  # enough, but there is no room
    world.cache.compress_due([req], promised=0)
    assert not world.cache.take_released()


def test_what_was_released_is_remembered_until_it_is_asked():
    """Whatever becomes of others meanwhile."""
    world = World(10)
    first, second = run(world, prompt(32), PLAIN), run(world, prompt(32, 500), PLAIN)
    assert report(second)["skipped"] == "no free blocks to compress into"
    world.cache.compress_due([second], promised=0)
    assert world.cache.take_released()
    world.cache.compress_due([second], promised=0)
    assert not world.cache.take_released()
    release_kv_cache(first, world.cache)
    world.cache.compress_due([second], promised=0)
    assert world.cache.take_released()
    assert report(second)["skipped"] is None


def test_what_decode_released_is_remembered_too():
    world = World(60)
    due, later = run(world, prompt(32), GOES_ON), run(world, prompt(32, 500), GOES_ON)
    world.cache.take_released()
    for _ in range(8):
        world.decode()
    later.kv_committed_len -= 1
    world.cache.compress_due([due, later], promised=0)
    assert report(due)["decode"]["recompressed"] == 1
    assert report(later)["decode"]["recompressed"] == 0
    assert world.cache.take_released()


# ---------------------------------------------------------------------------- whether


def test_a_scorer_of_all_queries_takes_nothing_that_it_has_not_seen():
    world = World(40)
    run(world, prompt(32), None)
    assert world.admit(world.request(prompt(32), PLAIN)) == 28
    assert world.admit(world.request(prompt(32), H2O)) == 0


def test_tenants_do_not_share():
    """SGLang keeps the trees of different ``extra_key`` apart; so must what compression asks."""
    world = World(60)
    run(world, prompt(32), None)
    req = world.request(prompt(32), PLAIN | {"prefix_tokens": 16})
    req.extra_key = "tenant"
    assert world.admit(req) == 0
    assert world.prefill(req, 0, 32)
    assert world.cache.sharing.share(Request.of(req), 0, 8) == 8
    world.cache.cache_unfinished_req(req)
    assert Request.of(req).segment is not None
    assert world.cache.protected_size() == 32 + 16


@pytest.mark.parametrize("question", [0, 8])
def test_what_a_prompt_begins_with_is_told_as_sglang_has_it(question):
    """int64, whatever a row of ``req_to_token`` holds."""
    world = World(40)
    req = run(world, prompt(32), PLAIN | {"question_tokens": question})
    assert Request.of(req).segment is not None
    assert req.prefix_indices.dtype == torch.int64
    assert torch.equal(req.prefix_indices, world.cache.row_slots(req)[:32].long())


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
        req.prefix_indices = torch.arange(end - 1)
        assert world.cache.room_before_cut(req) == 1
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


def test_states_are_held_from_the_match_on():
    """Others may end in between (priority scheduling), and their states displace these."""
    world = World(40)
    scores = []
    for forget in (False, True):
        req = world.request(prompt(32), H2O)
        done = world.admit(req)
        assert (done > 0) == forget
        if forget:
            world.cache.states.clear()
        assert world.prefill(req, done, 32)
        scores.append(Request.of(req).scores.states)
        world.cache.cache_unfinished_req(req)
    for first, second in zip(*scores, strict=True):
        assert second is first


@pytest.mark.parametrize(("how", "cached"), [({}, 32), ({"is_insert": False}, 0)])
def test_what_is_left_to_the_tree(how, cached):
    """All of it, unless SGLang says otherwise: of a retracted request nothing."""
    world = World(40)
    req = world.request(prompt(32), None)
    world.admit(req)
    assert world.prefill(req, 0, 32)
    world.cache.cache_finished_req(req, kv_len_to_handle=32, **how)
    assert world.cache.evictable_size() == cached
    assert world.allocator.available_size() == world.tokens - cached


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
