"""Requests with one document and a question apart: one makes the segment, all read it."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request
from tests import tiny_models
from tests.sgl_kvc.documents import DOCUMENT, KNOB, SEGMENT, apart, ask, cached, end
from tests.sgl_kvc.lives import PAGE
from tests.sgl_kvc.test_request import blocks_held, run


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


def test_a_document_is_prefilled_and_held_once(checked_lives):
    world = checked_lives.world
    reqs = [ask(world, [i, i, i]) for i in range(1, 6)]
    assert {id(Request.of(req).stored) for req in reqs} == {id(Request.of(reqs[0]).stored)}
    assert len(world.cache.segments) == 1
    assert Request.of(reqs[0]).stored.hits == 4
    assert blocks_held(world) == SEGMENT + 5  # a block each for the question
    checked_lives.contents()
    for _ in range(3 * PAGE):
        world.decode()
    assert blocks_held(world) == SEGMENT + 5 * 4


def test_all_readers_read_the_same(checked_lives):
    first, second = ask(checked_lives.world, [1, 2]), ask(checked_lives.world, [3, 4, 5])
    assert checked_lives.positions(first)[0][-2:] == [32, 33]
    kept = [
        [[p for p in head if p < 32] for head in checked_lives.positions(req)]
        for req in (first, second)
    ]
    assert kept[0] == kept[1]
    reports = [Request.of(req).report.to_json() for req in (first, second)]
    assert [report["blocks"]["after"] for report in reports] == [SEGMENT + 1] * 2
    assert [report["skipped"] for report in reports] == [None] * 2


def test_it_outlives_its_readers_and_the_uncompressed_copy(checked_lives):
    world = checked_lives.world
    end(world, ask(world, [1, 2]))
    assert cached(world, [3, 4]) == 32
    world.cache.evict(EvictParams(num_tokens=32))  # the least recently used: the document itself
    assert world.cache.total_size() == SEGMENT * PAGE
    assert cached(world, [3, 4]) == 32
    req = ask(world, [3, 4])
    assert Request.of(req).stored.hits == 1
    assert blocks_held(world) == SEGMENT + 1


def test_who_wants_it_explained_makes_its_own(checked_lives):
    """Of a segment that another has made, the selection is not there any more."""
    world = checked_lives.world
    first, second = ask(world, [1, 2]), ask(world, [3, 4], explain=True)
    assert Request.of(first).stored is not None
    assert Request.of(second).stored is None
    assert len(world.cache.segments) == 1
    told = [Request.of(req).report.to_json() for req in (first, second)]
    assert "explain" not in told[0]
    assert told[1]["explain"]["positions"] is not None
    assert sum(told[1]["explain"]["kept"]) > 0


def test_who_does_not_ask_for_it_never_reads_it(checked_lives):
    """Nor with another knob, of another tenant, or with another document."""
    world = checked_lives.world
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


def test_tenants_have_segments_of_their_own(checked_lives):
    world = checked_lives.world
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
def test_a_reader_that_ends_takes_nothing_from_the_others(checked_lives, insert):
    world = checked_lives.world
    first, second, third = (ask(world, [i, i]) for i in (1, 2, 3))
    end(world, first, is_insert=insert)
    checked_lives.contents()
    end(world, third, is_insert=False)
    world.cache.evict(EvictParams(num_tokens=world.tokens))
    checked_lives.accounting()
    checked_lives.contents()
    assert blocks_held(world) == SEGMENT + 1
    assert Request.of(second).stored is not None


def test_a_retracted_reader_begins_with_it_again(checked_lives):
    world = checked_lives.world
    first, second = ask(world, [1, 2]), ask(world, [3, 4])
    for _ in range(5):
        world.decode()
    world.live.remove(second)
    world.retract(second)
    assert Request.of(second).stored is None
    checked_lives.contents()
    assert world.admit(second) == 32
    assert world.prefill(second, 32, second.seqlen)
    world.cache.cache_unfinished_req(second)
    world.live.append(second)
    assert Request.of(second).stored is Request.of(first).stored


def test_a_reader_given_up_in_its_prefill_leaves_nothing(checked_lives):
    world = checked_lives.world
    ask(world, [1, 2])
    question = list(range(500, 510))
    req = world.request(DOCUMENT + question, apart(question))
    done = world.admit(req)
    assert world.prefill(req, done, 36)
    world.cache.cache_unfinished_req(req, chunked=True)
    world.give_up(req, 36)
    assert blocks_held(world) == SEGMENT + 1
    assert cached(world, question) == 36, "what was prefilled behind the segment can be used"


@pytest.mark.parametrize("question", [[1, 2], list(range(500, 510))])
def test_a_reader_that_ends_with_its_prefill_is_let_go(checked_lives, question):
    """``max_new_tokens: 1``: SGLang caches it as finished at once."""
    world = checked_lives.world
    for done in (0, 32):
        req = world.request(DOCUMENT + question, apart(question), max_new_tokens=1)
        assert world.admit(req) == done + (len(question) // PAGE * PAGE if done else 0)
        if not done:
            assert world.prefill(req, 0, 32)
            world.cache.cache_unfinished_req(req, chunked=True)
        assert world.prefill(req, len(req.prefix_indices), 32 + len(question))
        release_kv_cache(req, world.cache)
        assert blocks_held(world) == 0
        checked_lives.accounting()
    assert [stored.readers for stored in world.cache.segments] == [0]


def test_what_lies_behind_a_segment_is_found_behind_it(checked_lives):
    """The same question again, and an answer of which more is asked: ordinary nodes of the tree."""
    world, question = checked_lives.world, list(range(500, 510))
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
    checked_lives.contents()
    plain = world.request(DOCUMENT + question, None)
    plain.init_next_round_input(world.cache)
    assert len(plain.prefix_indices) == 32, "nothing of what was read over the segment"


def test_the_prefix_before_it_is_shared_too(checked_lives):
    world = checked_lives.world
    reqs = [ask(world, [i, i], prefix_tokens=9) for i in (1, 2)]
    run(world, [*DOCUMENT[:8], 5, 6], None)
    assert [Request.of(req).segment.begin for req in reqs] == [8, 8]
    assert Request.of(reqs[0]).stored is Request.of(reqs[1]).stored
    segment = Request.of(reqs[0]).segment.blocks
    assert blocks_held(world) == 2 + segment + 2 + 1
    end(world, reqs[0])
    world.cache.evict(EvictParams(num_tokens=world.tokens))
    checked_lives.contents()


def test_a_segment_that_was_evicted_is_made_anew(checked_lives):
    world = checked_lives.world
    end(world, ask(world, [1, 2]))
    world.cache.evict(EvictParams(num_tokens=world.tokens))
    assert len(world.cache.segments) == 0
    assert cached(world, [1, 2]) == 0
    req = ask(world, [1, 2])
    assert Request.of(req).stored.hits == 0
    assert len(world.cache.segments) == 1


def test_without_room_before_the_question_nothing_is_shared(checked_lives):
    """The question was read over the full cache, and is not to be found behind the segment."""
    world, question = checked_lives.world, [1, 2, 3, 4, 5]
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


def test_who_needs_the_documents_logits_prefills_it_and_reads_the_segment_there_is(checked_lives):
    world = checked_lives.world
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


def test_what_was_read_with_other_embeddings_is_nobody_elses(checked_lives):
    world = checked_lives.world
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


def test_a_flushed_cache_has_no_segments(checked_lives):
    world = checked_lives.world
    end(world, ask(world, [1, 2]))
    checked_lives.flush(abort=False)
    assert len(world.cache.segments) == 0
    assert cached(world, [1, 2]) == 0
