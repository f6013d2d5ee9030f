"""Whoever is let in leaves room to compress, once memory is short, those that wait for that."""

from __future__ import annotations

import pytest
from sglang.srt.managers.schedule_policy import PrefillAdder

from sgl_kvc.cache.timing import reserved_tokens
from sgl_kvc.compat.scheduling import stop_at_cut
from tests.sgl_kvc.lives import PAGE
from tests.sgl_kvc.test_pressure import KNOB, PROMPT, SEGMENT, server_args, start  # noqa: F401
from tests.sgl_kvc.test_request import run


def test_what_an_uncompressed_request_would_need_is_set_aside(checked_lives):
    """Whoever is let in meanwhile."""
    world = checked_lives.world
    reqs = [start(world, 1), start(world, 2, on_pressure=2)]
    plain = run(world, list(range(900, 920)), None)
    assert reserved_tokens(world.cache, [plain]) == 0
    assert reserved_tokens(world.cache, reqs[:1]) == SEGMENT * PAGE
    assert reserved_tokens(world.cache, [plain, *reqs]) == PROMPT // 2
    assert world.cache.relieve(world.live, 0, once=True)
    assert reserved_tokens(world.cache, reqs[:1]) == SEGMENT * PAGE
    for _ in range(2 * PAGE):
        world.decode()
    assert reserved_tokens(world.cache, reqs[:1]) == (PROMPT + 2 * PAGE) // 4 // PAGE * PAGE + PAGE


def adder(world):
    batch = world._batch()
    return PrefillAdder(PAGE, world.cache, world.allocator, batch, 0.0, 1000, None)


@pytest.mark.parametrize(
    ("waits", "free", "enters"), [(True, 7, False), (True, 8, True), (False, 6, True)]
)
def test_who_is_let_in_leaves_room_to_compress_who_runs(checked_lives, waits, free, enters):
    """A prompt of 4 blocks and its answer; SGLang counts a block besides. The copy takes 2."""
    world = checked_lives.world
    start(world, 1, **({} if waits else {"on_pressure": None, "rate": 1}))
    new = world.request(list(range(700, 700 + 4 * PAGE)), None, max_new_tokens=1)
    new.init_next_round_input(world.cache)
    hog = world.allocator.alloc(world.allocator.available_size() - free * PAGE)
    adding = adder(world)
    stop_at_cut(
        PrefillAdder.add_one_req, adding, new, has_chunked_req=False, truncation_align_size=None
    )
    assert bool(adding.can_run_list) is enters
    assert adding.rem_total_token_offset == (5 * PAGE + 1 if enters else 0)
    if enters:
        world.cache.dec_lock_ref(new.last_node)
    world.allocator.free(hog)


def test_who_would_be_alone_is_let_in_whatever_its_copy_takes(checked_lives):
    world = checked_lives.world
    new = world.request(list(range(PROMPT)), KNOB, max_new_tokens=2)
    new.init_next_round_input(world.cache)
    hog = world.allocator.alloc(world.tokens - PROMPT - 2 * PAGE)
    adding = adder(world)
    stop_at_cut(
        PrefillAdder.add_one_req, adding, new, has_chunked_req=False, truncation_align_size=None
    )
    assert adding.can_run_list == [new]
    world.cache.dec_lock_ref(new.last_node)
    world.allocator.free(hog)
