"""One request's compression: what its knob and its neighbours make of it."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request
from sgl_kvc.policy.facts import ModelFacts
from tests import tiny_models
from tests.sgl_kvc.lives import HEADS, LAYERS, PAGE, World


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


def run(world: World, tokens: list[int], knob: dict | None, **sampling):
    """Prefill a whole prompt, cut where it has to be, and let it decode."""
    req = world.request(tokens, knob, **sampling)
    done = world.admit(req)
    while done < len(tokens):
        room = world.cache.room_before_cut(req)
        end = len(tokens) if room is None else done + room
        assert world.prefill(req, done, end)
        world.cache.cache_unfinished_req(req, chunked=end < len(tokens))
        done = end
    world.live.append(req)
    return req


@pytest.mark.parametrize(
    ("knob", "field"),
    [("fast", "kv_compression"), ({"rate": "8"}, "rate"), ({"rate": 8, "policy": 3}, "policy")],
)
def test_a_bad_knob_does_not_end_the_scheduler(knob, field):
    """It can come by ways that nobody has validated: then it is as none, and the report says so."""
    world = World(40)
    req = run(world, list(range(100, 160)), knob)
    world.decode()
    assert Request.of(req).segment is None
    skipped = Request.of(req).report.to_json()["skipped"]
    assert field in skipped
    release_kv_cache(world.live.pop(), world.cache)


def test_compression_does_not_take_what_the_next_step_was_promised():
    """Decode ran out of memory after SGLang had checked that there was room."""
    world, shared = World(12), list(range(100, 132))
    run(world, shared, None)
    # A request that shares 8 of its 9 blocks: compression takes 3 and frees 1.
    req = world.request([*shared, 1, 2, 3, 4], {"rate": 4, "min_tokens": 0, "window": 2})
    assert world.admit(req) == 32
    assert world.prefill(req, 32, 36)
    world.live.append(req)  # as with overlap: the first step is prepared before the result is seen
    assert world.allocator.available_size() == 3 * PAGE
    assert world.decode() == []  # both need a block; raised "Decode out of memory"


def shared_prompt(number: int) -> list[int]:
    """22 blocks, 20 of them the same for all."""
    return list(range(80)) + [1000 + number] * 8


def blocks_held(world: World) -> int:
    """Blocks that nobody else can have: neither free nor evictable."""
    return (world.tokens - world.allocator.available_size() - world.cache.evictable_size()) // PAGE


def admit_together(world: World, knob: dict | None, number: int = 5) -> list:
    """Requests of one shared prompt, all of them running before the first decode step."""
    reqs = []
    for i in range(number):
        tokens = shared_prompt(i)
        req = world.request(tokens, knob)
        done = world.admit(req)
        while done < len(tokens):
            room = world.cache.room_before_cut(req)
            end = len(tokens) if room is None else done + room
            assert world.prefill(req, done, end)
            if end < len(tokens) or i == 0:
                world.cache.cache_unfinished_req(req, chunked=end < len(tokens))
            done = end
        reqs.append(req)
    for req in reqs[1:]:
        world.cache.cache_unfinished_req(req)
    world.live += reqs
    return reqs


def test_compression_takes_no_more_than_it_frees():
    """Five requests that share 20 of 22 blocks held 30 blocks plain and 55 at rate 2."""
    world = World(120)
    admit_together(world, None)
    plain = blocks_held(world)
    assert plain == 20 + 5 * 2
    world = World(120)
    reqs = admit_together(world, {"rate": 2, "min_tokens": 0})
    assert blocks_held(world) <= plain + 11  # the first came alone
    skipped = [Request.of(req).report.to_json()["skipped"] for req in reqs[1:]]
    assert all("11 blocks" in reason and "prefix_tokens" in reason for reason in skipped)


def test_compression_of_a_shared_prompt_pays_where_all_copies_are_small():
    world = World(120)
    reqs = admit_together(world, {"rate": 8, "min_tokens": 0})
    assert all(Request.of(req).segment is not None for req in reqs)
    assert blocks_held(world) == 5 * 3


def test_force_compresses_at_a_loss():
    world = World(120)
    reqs = admit_together(world, {"rate": 2, "min_tokens": 0, "force": True})
    assert all(Request.of(req).segment is not None for req in reqs)
    assert blocks_held(world) == 5 * 11


def test_prefix_tokens_are_held_once():
    world = World(120)
    knob = {"rate": 2, "min_tokens": 0, "prefix_tokens": 80}
    reqs = admit_together(world, knob)
    assert blocks_held(world) == 20 + 5 * 1
    report = Request.of(reqs[0]).report.to_json()
    assert report["blocks"] == {"before": 22, "after": 1, "shared": 20}
    assert report["bytes"]["shared"] == 20 * world.pool.block_bytes
    assert report["kept_per_head"] == {"mean": 84.0, "min": 84, "max": 84}


def test_recompress_every_is_not_inert_where_less_than_a_block_precedes_the_question():
    world = World(40)
    knob = {"budget": 8, "recompress_every": 4, "question_tokens": 30, "min_tokens": 0}
    knob["policy"] = "kv-compress"
    req = run(world, list(range(100, 132)), knob)
    for _ in range(12):
        world.decode()
    assert Request.of(req).report.to_json()["decode"]["recompressed"] >= 1


def test_a_request_that_is_skipped_gives_up_no_prefix_hits():
    """The prefix cache held back the window of requests that were then not compressed."""
    world = World(40)
    run(world, list(range(100, 132)), None)
    knob = {"rate": 4, "policy": "razor-attention", "min_tokens": 0}  # needs a head profile
    req = world.request([*range(100, 132), 7, 8], knob)
    assert world.admit(req) == 32
    assert "head profile" in Request.of(req).extent.skipped


def test_nothing_is_scored_for_a_single_token():
    world = World(40)
    req = run(world, list(range(100, 132)), {"rate": 4, "min_tokens": 0}, max_new_tokens=1)
    assert Request.of(req).scores is None
    assert "no token is decoded" in Request.of(req).report.to_json()["skipped"]


def test_copies_of_a_prompt_find_what_was_seen_of_it():
    """``n > 1``: SGLang prefills the prompt once, with nothing to decode, and then the copies."""
    world = World(80)
    knob, tokens = {"rate": 4, "policy": "h2o", "min_tokens": 0}, list(range(100, 164))
    req = world.request(tokens, knob, max_new_tokens=0)
    assert world.admit(req) == 0
    assert world.prefill(req, 0, 64)
    release_kv_cache(req, world.cache)
    copy = world.request(tokens, knob)
    assert world.admit(copy) == 60  # all but the last query; none before
    seen = world.cache.states.get(Request.of(copy).states_key(copy))
    assert world.prefill(copy, 60, 64)
    assert Request.of(copy).scores.states is seen, "of all queries, not of the last chunk's"


def test_scorers_are_told_facts_about_the_model():
    world, profile = World(40), torch.zeros(LAYERS, HEADS)
    profile[1, 2] = 1  # the one head that retrieves
    world.pool.facts = ModelFacts(head_profile=profile)
    req = run(world, list(range(100, 164)), {"rate": 4, "policy": "razor-attention"})
    pages = Request.of(req).segment.pages.view(LAYERS, HEADS)
    assert pages[1, 2] == pages.max() > 2 * pages[0].max()
