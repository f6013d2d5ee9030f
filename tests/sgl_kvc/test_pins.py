"""Stored segments that stay until they are released."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request
from tests import tiny_models
from tests.sgl_kvc.documents import DOCUMENT, SEGMENT, apart, ask, cached, end
from tests.sgl_kvc.lives import PAGE, World


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


def pinned(world: World, question: list[int], document: list[int] = DOCUMENT, **knob):
    """As `ask`, of a request that is there to pin the document."""
    req = world.request(document + question, apart(question, **knob))
    req.sampling_params.custom_params["kv_cache_pin"] = {"expires": 7.5}
    done = world.admit(req)
    while done < len(document + question):
        room = world.cache.room_before_cut(req)
        stop = len(document + question) if room is None else done + room
        assert world.prefill(req, done, stop)
        world.cache.cache_unfinished_req(req, chunked=room is not None)
        done = stop
    world.live.append(req)
    return req


def test_a_pinned_segment_stays_until_it_is_released(checked_lives):
    world = checked_lives.world
    req = pinned(world, [1, 2])
    name = Request.of(req).report.to_json()["pinned"]
    assert name == Request.of(req).stored.name
    end(world, req)
    world.cache.evict(EvictParams(num_tokens=world.tokens))
    assert cached(world, [3, 4]) == 32
    assert world.cache.protected_size() == SEGMENT * PAGE
    assert world.cache.pins.release(name)
    assert not world.cache.pins.release(name)
    assert world.cache.protected_size() == 0
    world.cache.evict(EvictParams(num_tokens=world.tokens))
    assert cached(world, [3, 4]) == 0


def test_a_document_is_pinned_once_however_often_that_is_asked(checked_lives):
    world = checked_lives.world
    ask(world, [9, 9])
    for question in ([1, 2], [3, 4]):
        req = pinned(world, question)
        assert Request.of(req).report.to_json()["pinned"] == Request.of(req).stored.name
        end(world, req)
    assert "pinned" not in Request.of(world.live[0]).report.to_json()
    name = Request.of(world.live[0]).stored.name
    end(world, world.live[0])
    assert world.cache.pins.release(name)
    assert world.cache.protected_size() == 0


def test_pins_take_half_of_the_pool_at_most(checked_lives):
    """Of 40 blocks: a document's segment has 7 at this rate."""
    world, names = checked_lives.world, []
    for first in (100, 200, 300):
        req = pinned(world, [1, 2], list(range(first, first + 32)), rate=1.2)
        assert Request.of(req).stored is not None
        names.append(Request.of(req).report.to_json().get("pinned"))
        end(world, req)
    assert names[2] is None
    assert None not in names[:2]
    assert world.cache.protected_size() == 2 * 7 * PAGE
    assert world.cache.pins.release_oldest() == names[0]
    assert world.cache.pins.release_oldest() == names[1]
    assert world.cache.pins.release_oldest() is None
    assert world.cache.protected_size() == 0


def test_what_is_told_of_stored_segments(checked_lives):
    world = checked_lives.world
    first, second = ask(world, [1, 2], prefix_tokens=9), pinned(world, [3, 4])
    ask(world, [5, 6])
    told = {each["id"]: each for each in world.cache.list_segments()}
    assert told[Request.of(first).stored.name] == {
        "id": Request.of(first).stored.name, "cache_salt": None, "tokens": 32, "prefix_tokens": 8,
        "blocks": 2, "bytes": 2 * world.pool.block_bytes, "policy": "kv-compress", "rate": 4.0,
        "budget": None, "readers": 1, "hits": 0, "pinned": False, "expires": None,
    }  # fmt: skip
    other = told[Request.of(second).stored.name]
    assert (other["readers"], other["hits"]) == (2, 1)
    assert (other["pinned"], other["expires"]) == (True, 7.5)
    end(world, second)
    assert world.cache.list_segments()[1]["readers"] == 1
    assert world.cache.pins.release(other["id"])


def test_a_flush_forgets_pins(checked_lives):
    world = checked_lives.world
    req = pinned(world, [1, 2])
    name = Request.of(req).stored.name
    end(world, req)
    checked_lives.flush(abort=False)
    assert not world.cache.pins.release(name)
    assert world.cache.list_segments() == []
    assert cached(world, [1, 2]) == 0


def test_names_follow_from_tokens_and_namespace(checked_lives):
    world = checked_lives.world
    reqs = [ask(world, [1, 2]), ask(world, [1, 2], rate=8), ask(world, [1], [*DOCUMENT[:-1], 7])]
    names = {Request.of(req).stored.name for req in reqs}
    assert len(names) == 3
    again = World(40)
    assert Request.of(ask(again, [3, 4])).stored.name == Request.of(reqs[0]).stored.name
