"""Chats: a turn begins with what the turn before has left, and is compressed to its own budget."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.held_scores import HeldScores
from sgl_kvc.cache.request import Request
from sgl_kvc.policy.base import LayerContext, scorer
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.spec import SpecError, parse
from tests import tiny_models
from tests.sgl_kvc.documents import end
from tests.sgl_kvc.lives import DIM, GROUP, HEADS, LAYERS, PAGE, kv, tokens_of
from tests.sgl_kvc.test_request import blocks_held, run

KNOB = {
    "rate": 4, "policy": "kv-compress", "min_tokens": 0, "sinks": 1, "recent": 2, "window": 2,
    "reuse": "compressed",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


def turn(lives, said: list[int], new: int, knob: dict | None = None, answer: int = 5) -> list[int]:
    """One turn of a chat: `new` tokens after what was `said`, and an answer; all that is said then.

    The request stays; the one before has ended.
    """
    world = lives.world
    prompt = said + [4000 + len(said) + i for i in range(new)]
    req = run(world, prompt, knob or KNOB)
    lives.accounting()
    lives.contents()
    for _ in range(answer):
        world.decode()
    lives.contents()
    return tokens_of(req)


def report(req) -> dict:
    return Request.of(req).report.to_json()


@pytest.mark.parametrize("knob", [{}, {"prefix_tokens": 9}, {"rate": None, "budget": 12}])
def test_every_turn_begins_with_the_one_before(checked_lives, knob):
    world, said, begun = checked_lives.world, [], []
    knob = {name: value for name, value in (KNOB | knob).items() if value is not None}
    for new in (32, 11, 3, 14):
        said = turn(checked_lives, said, new, knob)
        (req,) = world.live
        request = Request.of(req)
        begun.append(report(req).get("begun_with"))
        assert request.segment.end == request.extent.end
        assert request.segment.blocks == request.extent.segment_blocks
        assert request.stored.namespace.turn
        assert report(req)["skipped"] is None
        end(world, req)
        checked_lives.accounting()
        assert not any(stored.readers for stored in world.cache.segments)
    assert begun == [None, 32, 48, 56]
    world.cache.evict(EvictParams(num_tokens=world.tokens))
    assert len(world.cache.segments) == 0


def test_a_turn_prefills_only_what_is_new(checked_lives):
    world = checked_lives.world
    said = turn(checked_lives, [], 32)
    end(world, world.live[0])
    req = world.request([*said, 1, 2, 3], KNOB)
    req.init_next_round_input(world.cache)
    assert len(req.prefix_indices) == 36, "the segment and the answer's whole block"


def test_a_chat_holds_what_its_budget_says(checked_lives):
    world, said = checked_lives.world, []
    for new in (60, 8, 8, 8):
        said = turn(checked_lives, said, new, KNOB | {"rate": 8}, answer=4)
        length = len(said)
        assert blocks_held(world) <= -(-length // PAGE // 8) + 3
        end(world, world.live[0])


def test_where_nothing_has_to_go_the_turn_goes_on_as_it_is(checked_lives):
    """Less than a block is new."""
    world = checked_lives.world
    said = turn(checked_lives, [], 40, answer=0)
    first = Request.of(world.live[0]).segment
    end(world, world.live[0])
    turn(checked_lives, said, 2)
    assert report(world.live[0])["begun_with"] == 40
    assert Request.of(world.live[0]).segment is first
    assert Request.of(world.live[0]).scores is None


def test_without_room_a_turn_goes_on_with_what_it_began(checked_lives):
    world = checked_lives.world
    said = turn(checked_lives, [], 32)
    first = Request.of(world.live[0]).segment
    end(world, world.live[0])
    allocate, world.cache.allocate = world.cache.allocate, lambda tokens: None
    turn(checked_lives, said, 9)
    world.cache.allocate = allocate
    assert Request.of(world.live[0]).segment is first
    assert Request.of(world.live[0]).scores is None
    for _ in range(6):
        world.decode()
    assert Request.of(world.live[0]).segment is first


def test_who_does_not_allow_it_never_begins_with_a_turn(checked_lives):
    world = checked_lives.world
    said = turn(checked_lives, [], 32)
    end(world, world.live[0])
    world.cache.evict(EvictParams(num_tokens=32))
    full = KNOB | {"reuse": "full"}
    for knob in (None, full, KNOB | {"rate": 5}, KNOB | {"reuse": None, "question_tokens": 5}):
        req = world.request([*said, 1, 2, 3], knob)
        req.init_next_round_input(world.cache)
        assert len(req.prefix_indices) == 0
    tenant = world.request([*said, 1, 2, 3], KNOB)
    tenant.extra_key = "tenant"
    tenant.init_next_round_input(world.cache)
    assert len(tenant.prefix_indices) == 0


def test_both_begins_with_the_uncompressed_turn_while_it_is_there(checked_lives):
    world, knob = checked_lives.world, KNOB | {"reuse": "both"}
    said = turn(checked_lives, [], 33, knob, answer=0)
    end(world, world.live[0])
    later = [*said, *range(5)]
    for begun in (None, 32):
        req = world.request(later, knob)
        world.admit(req)
        assert len(req.prefix_indices) == 32
        assert (Request.of(req).found is None) is (begun is None)
        world.cache.dec_lock_ref(req.last_node)
        (stored,) = world.cache.segments
        assert world.cache.pin_segment(stored, None)
        world.cache.evict(EvictParams(num_tokens=world.tokens))
    assert world.cache.pins.release(stored.name)


def test_a_turn_begins_with_a_document_that_was_read_apart(checked_lives):
    world, document = checked_lives.world, list(range(100, 132))
    knob = KNOB | {"question_tokens": 2, "reuse": None}
    req = run(world, [*document, 1, 2], knob)
    end(world, req)
    turn(checked_lives, document, 9)
    assert report(world.live[0])["begun_with"] == 32


def test_a_retracted_turn_begins_with_its_own_segment(checked_lives):
    world = checked_lives.world
    said = turn(checked_lives, [], 32)
    end(world, world.live[0])
    turn(checked_lives, said, 9)
    req = world.live.pop()
    world.retract(req)
    done = world.admit(req)
    assert done >= 44
    assert world.prefill(req, done, req.seqlen)
    world.cache.cache_unfinished_req(req)
    world.live.append(req)
    assert Request.of(req).segment.end == req.seqlen // PAGE * PAGE


def test_every_head_is_scored_over_what_it_holds(checked_lives):
    """By the policy's scorer, as if the KVs that the head holds were a prompt."""
    world = checked_lives.world
    said = turn(checked_lives, [], 32)
    end(world, world.live[0])
    req = world.request([*said, *range(9)], KNOB)
    done = world.admit(req)
    seen = {}
    look = HeldScores.look

    def watch(self, layer, queries, kvs, scale, lse=None):
        seen[layer] = queries[-2:]
        return look(self, layer, queries, kvs, scale, lse)

    HeldScores.look = watch
    try:
        assert world.prefill(req, done, len(said) + 9)
    finally:
        HeldScores.look = look
    request = Request.of(req)
    world.live.append(req)
    positions = checked_lives.positions(req)
    content = kv(tokens_of(req))
    for layer in range(LAYERS):
        for head in range(HEADS):
            held = positions[layer * HEADS + head]
            keys = content[held, layer, head][:, None]
            context = LayerContext(
                layer, LAYERS, seen[layer].view(-1, HEADS, GROUP, DIM)[:, head],
                PromptKVs.of(keys, -keys), 1.0,
                request.spec, torch.zeros(0), 0,
            )  # fmt: skip
            expected = scorer(request.spec).run(context)[0]
            found = request.scores._scores[layer][head]
            torch.testing.assert_close(found, expected)
    world.cache.cache_unfinished_req(req)


@pytest.mark.parametrize(
    "knob",
    [
        {"question_tokens": 3}, {"question": "last_message"}, {"policy": "h2o"},
        {"policy": "streaming-llm"}, {"recompress_every": 16},
    ],
)  # fmt: skip
def test_what_does_not_go_with_compressed_turns_is_refused(knob):
    for reuse in ("compressed", "both"):
        with pytest.raises(SpecError, match="reuse"):
            parse({"rate": 4, "reuse": reuse} | knob)
    assert parse({"rate": 4, "reuse": "full"} | knob).reuse == "full"
