"""Requests with one document and a question apart: one makes the segment, all read it."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request
from tests import tiny_models
from tests.sgl_kvc.lives import PAGE, World
from tests.sgl_kvc.test_cache import Lives
from tests.sgl_kvc.test_request import blocks_held, run

KNOB = {"rate": 4, "policy": "kv-compress", "min_tokens": 0, "sinks": 1, "recent": 2, "window": 2}
DOCUMENT, SEGMENT = list(range(100, 132)), 2  # blocks of the segment; 8 of the document


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


@pytest.fixture
def lives():
    """The machine of `test_cache`, for its checks."""
    lives = Lives()
    lives.build()
    yield lives
    lives.accounting()
    lives.contents()
    lives.teardown()


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


def test_a_document_is_prefilled_and_held_once(lives):
    world = lives.world
    reqs = [ask(world, [i, i, i]) for i in range(1, 6)]
    assert {id(Request.of(req).stored) for req in reqs} == {id(Request.of(reqs[0]).stored)}
    assert len(world.cache.segments) == 1
    assert Request.of(reqs[0]).stored.hits == 4
    assert blocks_held(world) == SEGMENT + 5  # a block each for the question
    lives.contents()
    for _ in range(3 * PAGE):
        world.decode()
    assert blocks_held(world) == SEGMENT + 5 * 4


def test_all_readers_read_the_same(lives):
    first, second = ask(lives.world, [1, 2]), ask(lives.world, [3, 4, 5])
    assert lives.positions(first)[0][-2:] == [32, 33]
    kept = [[[p for p in head if p < 32] for head in lives.positions(r)] for r in (first, second)]
    assert kept[0] == kept[1]
    reports = [Request.of(req).report.to_json() for req in (first, second)]
    assert [report["blocks"]["after"] for report in reports] == [SEGMENT + 1] * 2
    assert [report["skipped"] for report in reports] == [None] * 2


def test_it_outlives_its_readers_and_the_uncompressed_copy(lives):
    world = lives.world
    end(world, ask(world, [1, 2]))
    assert cached(world, [3, 4]) == 32
    world.cache.evict(EvictParams(num_tokens=32))  # the least recently used: the document itself
    assert world.cache.total_size() == SEGMENT * PAGE
    assert cached(world, [3, 4]) == 32
    req = ask(world, [3, 4])
    assert Request.of(req).stored.hits == 1
    assert blocks_held(world) == SEGMENT + 1


def test_who_does_not_ask_for_it_never_reads_it(lives):
    """Nor with another knob, of another tenant, or with another document."""
    world = lives.world
    end(world, ask(world, [1, 2]))
    world.cache.evict(EvictParams(num_tokens=32))
    assert len(world.cache.segments) == 1
    for knob in (None, KNOB, apart([1, 2], recompress_every=4), apart([1, 2, 3, 4, 5])):
        req = world.request([*DOCUMENT, 1, 2], knob)
        req.init_next_round_input(world.cache)
        assert len(req.prefix_indices) == 0
    for other in ({"rate": 5}, {"sinks": 2}, {"window": 3}, {"recent": 3}, {"policy": "snapkv"}):
        assert cached(world, [1, 2], **other) == 0, other
    assert cached(world, [1, 2], prefix_tokens=PAGE) == 0
    assert cached(world, [1, 2], [*DOCUMENT[:-1], 7]) == 0
    tenant = world.request([*DOCUMENT, 1, 2], apart([1, 2]))
    tenant.extra_key = "tenant"
    tenant.init_next_round_input(world.cache)
    assert len(tenant.prefix_indices) == 0
    assert cached(world, [1, 2], min_tokens=8, force=True) == 32, "they shape nothing"


def test_tenants_have_segments_of_their_own(lives):
    world = lives.world
    ask(world, [1, 2])
    req = world.request([*DOCUMENT, 1, 2], apart([1, 2]))
    req.extra_key = "tenant"
    assert world.admit(req) == 0
    assert world.prefill(req, 0, 32)
    world.cache.cache_unfinished_req(req, chunked=True)
    assert len(world.cache.segments) == 2
    assert world.prefill(req, 32, 34)
    world.cache.cache_unfinished_req(req)
    world.live.append(req)
    assert Request.of(req).stored is not Request.of(world.live[0]).stored


@pytest.mark.parametrize("insert", [True, False])
def test_a_reader_that_ends_takes_nothing_from_the_others(lives, insert):
    world = lives.world
    first, second, third = (ask(world, [i, i]) for i in (1, 2, 3))
    end(world, first, is_insert=insert)
    lives.contents()
    end(world, third, is_insert=False)
    world.cache.evict(EvictParams(num_tokens=world.tokens))
    lives.accounting()
    lives.contents()
    assert blocks_held(world) == SEGMENT + 1
    assert Request.of(second).stored is not None


def test_a_retracted_reader_begins_with_it_again(lives):
    world = lives.world
    first, second = ask(world, [1, 2]), ask(world, [3, 4])
    for _ in range(5):
        world.decode()
    world.live.remove(second)
    world.retract(second)
    assert Request.of(second).stored is None
    lives.contents()
    assert world.admit(second) == 32
    assert world.prefill(second, 32, second.seqlen)
    world.cache.cache_unfinished_req(second)
    world.live.append(second)
    assert Request.of(second).stored is Request.of(first).stored


def test_a_reader_given_up_in_its_prefill_leaves_nothing(lives):
    world = lives.world
    ask(world, [1, 2])
    question = list(range(500, 510))
    req = world.request(DOCUMENT + question, apart(question))
    done = world.admit(req)
    assert world.prefill(req, done, 36)
    world.cache.cache_unfinished_req(req, chunked=True)
    world.give_up(req, 36)
    assert blocks_held(world) == SEGMENT + 1
    assert cached(world, question) == 36, "what was prefilled behind the segment can be used"


def test_what_lies_behind_a_segment_is_found_behind_it(lives):
    """The same question again, and an answer of which more is asked: ordinary nodes of the tree."""
    world, question = lives.world, list(range(500, 510))
    req = ask(world, question)
    assert cached(world, question) == 40
    for _ in range(6):
        world.decode()
    answer = list(req.output_ids)
    end(world, req)
    assert cached(world, question) == 40
    assert cached(world, [*question, *answer, 7]) == 48
    assert cached(world, [*question[:4], 7, 7]) == 36
    again = ask(world, question)
    assert again.cache_protected_len == 40
    lives.contents()
    plain = world.request(DOCUMENT + question, None)
    plain.init_next_round_input(world.cache)
    assert len(plain.prefix_indices) == 32, "nothing of what was read over the segment"


def test_the_prefix_before_it_is_shared_too(lives):
    world = lives.world
    reqs = [ask(world, [i, i], prefix_tokens=9) for i in (1, 2)]
    run(world, [*DOCUMENT[:8], 5, 6], None)
    assert [Request.of(req).segment.begin for req in reqs] == [8, 8]
    assert Request.of(reqs[0]).stored is Request.of(reqs[1]).stored
    segment = Request.of(reqs[0]).segment.blocks
    assert blocks_held(world) == 2 + segment + 2 + 1
    end(world, reqs[0])
    world.cache.evict(EvictParams(num_tokens=world.tokens))
    lives.contents()


def test_a_segment_that_was_evicted_is_made_anew(lives):
    world = lives.world
    end(world, ask(world, [1, 2]))
    world.cache.evict(EvictParams(num_tokens=world.tokens))
    assert len(world.cache.segments) == 0
    assert cached(world, [1, 2]) == 0
    req = ask(world, [1, 2])
    assert Request.of(req).stored.hits == 0
    assert len(world.cache.segments) == 1


def test_without_room_before_the_question_nothing_is_shared(lives):
    """The question was read over the full cache, and is not to be found behind the segment."""
    world, question = lives.world, [1, 2, 3, 4, 5]
    allocate, world.cache.allocate = world.cache.allocate, lambda tokens: None
    req = ask(world, question)
    world.cache.allocate = allocate
    assert Request.of(req).segment is None
    world.decode()
    assert Request.of(req).segment is not None
    assert Request.of(req).stored is None
    assert len(world.cache.segments) == 0
    end(world, req)
    assert cached(world, question) == 28, "of the document alone, all but its last queries"


def test_who_needs_the_documents_logits_prefills_it_and_reads_the_segment_there_is(lives):
    world = lives.world
    first = ask(world, [1, 2])
    req = world.request([*DOCUMENT, 3, 4], apart([3, 4]))
    req.return_logprob, req.logprob_start_len = True, 5
    done = world.admit(req)
    assert done == PAGE
    assert world.prefill(req, done, 32)
    world.cache.cache_unfinished_req(req, chunked=True)
    assert Request.of(req).stored is Request.of(first).stored
    assert world.prefill(req, 32, 34)
    world.cache.cache_unfinished_req(req)
    world.live.append(req)
    assert blocks_held(world) == SEGMENT + 2


def test_what_was_read_with_other_embeddings_is_nobody_elses(lives):
    world = lives.world
    req = world.request([*DOCUMENT, 1, 2], apart([1, 2]))
    req.positional_embed_overrides = object()
    assert world.admit(req) == 0
    assert world.prefill(req, 0, 32)
    world.cache.cache_unfinished_req(req, chunked=True)
    assert Request.of(req).segment is not None
    assert len(world.cache.segments) == 0
    assert world.prefill(req, 32, 34)
    world.cache.cache_unfinished_req(req)
    world.live.append(req)


def test_a_flushed_cache_has_no_segments(lives):
    world = lives.world
    end(world, ask(world, [1, 2]))
    lives.flush()
    assert len(world.cache.segments) == 0
    assert cached(world, [1, 2]) == 0


# ------------------------------------------------------------------------------- pins


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


def test_a_pinned_segment_stays_until_it_is_released(lives):
    world = lives.world
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


def test_a_document_is_pinned_once_however_often_that_is_asked(lives):
    world = lives.world
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


def test_pins_take_half_of_the_pool_at_most(lives):
    """40 blocks: two documents of 8 at rate 1.1 are 16, a third would make 24."""
    world, names = lives.world, []
    for first in (100, 200, 300):
        req = pinned(world, [1, 2], list(range(first, first + 32)), rate=1.1)
        assert Request.of(req).stored is not None
        names.append(Request.of(req).report.to_json().get("pinned"))
        end(world, req)
    assert names[2] is None
    assert None not in names[:2]
    assert world.cache.protected_size() == 2 * 32
    assert world.cache.pins.release_oldest() == names[0]
    assert world.cache.pins.release_oldest() == names[1]
    assert world.cache.pins.release_oldest() is None
    assert world.cache.protected_size() == 0


def test_what_is_told_of_stored_segments(lives):
    world = lives.world
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


def test_a_flush_forgets_pins(lives):
    world = lives.world
    req = pinned(world, [1, 2])
    name = Request.of(req).stored.name
    end(world, req)
    lives.flush()
    assert not world.cache.pins.release(name)
    assert world.cache.list_segments() == []
    assert cached(world, [1, 2]) == 0


def test_names_follow_from_tokens_and_namespace(lives):
    world = lives.world
    reqs = [ask(world, [1, 2]), ask(world, [1, 2], rate=8), ask(world, [1], [*DOCUMENT[:-1], 7])]
    names = {Request.of(req).stored.name for req in reqs}
    assert len(names) == 3
    again = World(40)
    assert Request.of(ask(again, [3, 4])).stored.name == Request.of(reqs[0]).stored.name
