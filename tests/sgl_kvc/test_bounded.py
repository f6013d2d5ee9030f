"""Prompts that are compressed while they come in: they hold no more than a bound."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.bounded import tokens_at_most, tokens_to_come
from sgl_kvc.cache.held_scores import HeldScores
from sgl_kvc.cache.request import Request
from sgl_kvc.policy.facts import ModelFacts
from tests import tiny_models
from tests.sgl_kvc.documents import end
from tests.sgl_kvc.lives import PAGE
from tests.sgl_kvc.test_cache import Lives
from tests.sgl_kvc.test_request import blocks_held

#: 3 blocks are kept of 36, 4 come in at a time.
BUDGET, BLOCK = 3, 4
SIZES = {"budget": BUDGET * PAGE, "prefill_block": BLOCK * PAGE, "min_tokens": 0, "sinks": 1,
         "recent": 2}  # fmt: skip
KNOB = SIZES | {"policy": "virtual-repeat", "part": 16, "window": 3}
PROMPT = [100 + i for i in range(36 * PAGE - 30)]


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


@pytest.fixture
def small_lives():
    """A pool of 9 blocks, and checks of it at the end too."""
    lives = Lives()
    lives.build(9)
    yield lives
    lives.accounting()
    lives.contents()
    lives.teardown()


@pytest.fixture
def lives():
    lives = Lives()
    lives.build()
    yield lives
    lives.accounting()
    lives.contents()
    lives.teardown()


def prefill(lives, req, done: int, stop: int | None = None, sizes: Iterable[int] = ()):
    """Prefill what is left of `req`, or up to `stop`: blocks held after every chunk.

    Chunks have `sizes` at most.
    """
    world, length, held, most = lives.world, req.seqlen, [], iter(sizes)
    stop = length if stop is None else stop
    while done < stop:
        room = world.cache.room_before_cut(req)
        upto = length if room is None else done + room
        upto = min(upto, done + next(most, length))
        assert world.prefill(req, done, upto)
        held.append(blocks_held(world))
        world.cache.cache_unfinished_req(req, chunked=upto < length)
        world.pool.spans.check_integrity()
        done = upto
    if done == length:
        world.live.append(req)
    return held


def run(lives, tokens: list[int], knob: dict):
    """Prefill a prompt: its request, which decodes then, and blocks held after every chunk."""
    req = lives.world.request(tokens, knob)
    return req, prefill(lives, req, lives.world.admit(req))


def report(req) -> dict:
    return Request.of(req).report.to_json()


@pytest.mark.parametrize(
    "policy",
    [{"policy": "virtual-repeat", "part": 16, "window": 3}, {"policy": "kv-compress", "window": 3},
     {"policy": "h2o"}, {"policy": "streaming-llm"}],
)  # fmt: skip
def test_a_prompt_three_times_the_pool_holds_its_bound(small_lives, policy):
    world = small_lives.world
    assert len(PROMPT) > 3 * world.tokens
    req, held = run(small_lives, PROMPT, SIZES | policy)
    small_lives.contents()
    assert max(held) <= BUDGET + BLOCK + 1
    assert blocks_held(world) == BUDGET + 1
    assert report(req)["prefill"] == {
        "block": BLOCK * PAGE, "compressed": 7, "blocks_peak": max(held)
    }  # fmt: skip
    assert report(req)["blocks"]["after"] == BUDGET + 1
    assert world.cache.total_size() == 0, "nothing of it is in the tree"
    for _ in range(5):
        world.decode()
    small_lives.contents()


def test_what_is_kept_by_position_is_as_if_it_was_compressed_at_its_end(lives):
    kept = []
    for knob in ({}, {"prefill_block": None}):
        knob = SIZES | {"policy": "streaming-llm", "recent": 6} | knob
        req, _ = run(lives, PROMPT, knob)
        kept.append(lives.positions(req))
        end(lives.world, req, is_insert=False)
    assert kept[0] == kept[1]


def test_scores_stay_with_their_keys(lives):
    """What was said of a key when it came in is said of it at the last."""
    world, said = lives.world, {}
    knob = KNOB | {"leverage": 0.0, "profile_power": 0.0, "sinks": 0, "recent": 0}
    req = world.request(PROMPT, knob)
    done = world.admit(req)
    while done < len(PROMPT):
        room = world.cache.room_before_cut(req)
        upto = len(PROMPT) if room is None else done + room
        assert world.prefill(req, done, upto)
        scores = Request.of(req).scores
        req.kv_committed_len = upto
        for head, positions in enumerate(lives.positions(req)):
            state = scores._by_head[head].scores[0]
            assert len(state) == len(positions)
            for position, score in zip(positions, state.tolist(), strict=True):
                if position < done:
                    assert said[head, position] == score
                said[head, position] = score
        world.cache.cache_unfinished_req(req, chunked=upto < len(PROMPT))
        done = upto
    world.live.append(req)
    # The best that came in are left, by whole chunks of a page.
    for head, positions in enumerate(lives.positions(req)):
        kept = [said[head, each] for each in positions if each < done // PAGE * PAGE]
        rest = [said[head, each] for each in range(done // PAGE * PAGE) if each not in positions]
        assert max(kept) >= max(rest)


@pytest.mark.parametrize("chunks", range(8))
def test_an_abort_in_mid_prompt_leaks_nothing(small_lives, chunks):
    world = small_lives.world
    req = world.request(PROMPT, KNOB | {"prefix_tokens": 5})
    world.admit(req)
    prefill(small_lives, req, 0, stop=14 * chunks, sizes=[14] * 2 * chunks)
    world.give_up(req, len(req.prefix_indices))
    small_lives.accounting()
    assert blocks_held(world) == 0


def test_a_retracted_request_begins_again_within_its_bound(small_lives):
    world = small_lives.world
    req, _ = run(small_lives, PROMPT, KNOB)
    world.decode()
    world.live.remove(req)
    world.retract(req)
    assert blocks_held(world) == 0
    assert Request.of(req).bounded is None
    held = prefill(small_lives, req, world.admit(req))
    assert max(held) <= BUDGET + BLOCK + 1


def test_chunks_that_end_anywhere_keep_the_bound(small_lives):
    """Where memory is short SGLang cuts a chunk wherever it ends."""
    world = small_lives.world
    req = world.request(PROMPT, KNOB)
    held = prefill(small_lives, req, world.admit(req), sizes=[7, 3, 9, 5] * 20)
    assert max(held) <= BUDGET + BLOCK + 1
    assert report(req)["prefill"]["compressed"] == 7


def test_prefix_tokens_are_shared_and_not_counted(lives):
    world, knob = lives.world, KNOB | {"prefix_tokens": 13}
    first, held = run(lives, PROMPT, knob)
    assert max(held) <= 3 + BUDGET + BLOCK + 1
    second = world.request([*PROMPT[:12], *PROMPT], knob)
    assert world.admit(second) == 12
    world.give_up(second, 12)
    assert report(first)["blocks"]["shared"] == 3
    assert report(first)["prefill"]["blocks_peak"] == max(held) - 3


def test_a_document_longer_than_the_pool_is_stored_and_read(small_lives):
    world = small_lives.world
    question = [7, 8, 9]
    knob = KNOB | {"question_tokens": 3}
    req, held = run(small_lives, PROMPT[:-2] + question, knob)
    assert max(held) <= BUDGET + BLOCK + 1
    small_lives.contents()
    (stored,) = world.cache.segments
    assert stored.segment.blocks == BUDGET
    end(world, req)
    other = world.request([*PROMPT[:-2], 3, 2, 1], knob)
    assert world.admit(other) == stored.segment.end
    assert tokens_to_come(other, PAGE) is None
    world.give_up(other, 0)
    for different in ({"prefill_block": None}, {"prefill_block": 5 * PAGE}):
        other = world.request([*PROMPT[:-2], 3, 2, 1], knob | different)
        assert world.admit(other) == 0
        world.give_up(other, 0)
    world.cache.evict(EvictParams(num_tokens=world.tokens))
    assert len(world.cache.segments) == 0


def test_who_comes_second_to_a_document_reads_what_the_first_has_stored(lives):
    world = lives.world
    knob = KNOB | {"question_tokens": 2}
    prompt = [*range(40), 7, 8]
    late = world.request(prompt, knob)
    world.admit(late)
    prefill(lives, late, 0, stop=24)
    first, _ = run(lives, prompt, knob)
    prefill(lives, late, 24)
    assert Request.of(late).stored is Request.of(first).stored
    assert Request.of(late).stored.readers == 2
    assert blocks_held(world) == BUDGET + 2


def test_a_step_that_is_prepared_before_the_prefill_is_seen_reads_what_is_kept(lives):
    """With overlap scheduling."""
    world = lives.world
    req = world.request(PROMPT, KNOB)
    done = world.admit(req)
    while (room := world.cache.room_before_cut(req)) is not None:
        assert world.prefill(req, done, done + room)
        world.cache.cache_unfinished_req(req, chunked=True)
        done += room
    assert world.prefill(req, done, len(PROMPT))
    world.live.append(req)
    world.decode()
    assert Request.of(req).segment.end == Request.of(req).extent.end
    assert Request.of(req).scores is None


def test_what_is_to_come_shrinks_with_what_is_held(small_lives):
    world, facts = small_lives.world, ModelFacts(cos_sin=torch.zeros(1))
    most = (BUDGET + BLOCK + 1) * PAGE
    req = world.request(PROMPT, KNOB)
    assert tokens_at_most(req, PAGE, facts, cached=True) == most
    assert tokens_at_most(req, PAGE, facts, cached=False) is None
    assert tokens_at_most(req, PAGE, ModelFacts(), cached=True) is None, "its policy cannot run"
    assert tokens_at_most(world.request(PROMPT, None), PAGE, facts, cached=True) is None
    done = world.admit(req)
    assert tokens_to_come(req, PAGE) == most
    while (room := world.cache.room_before_cut(req)) is not None:
        assert world.prefill(req, done, done + room)
        world.cache.cache_unfinished_req(req, chunked=True)
        done += room
        assert tokens_to_come(req, PAGE) == most - blocks_held(world) * PAGE
    world.give_up(req, done)


def test_one_state_for_each_head_where_heads_differ(lives):
    """The head profile that weighs scores is the head's own."""
    world = lives.world
    profile = torch.tensor([[0.1, 0.9, 0.2], [0.3, 0.4, 0.5]])
    world.pool.facts = ModelFacts(cos_sin=world.pool.facts.cos_sin, head_profile=profile)
    found = {}
    for power in (0.0, 1.0):
        knob = KNOB | {"policy": "virtual-repeat-echo", "window": 4, "leverage": 0, "echo": 0,
                       "repeat_power": power}  # fmt: skip
        torch.manual_seed(0)
        req = world.request(PROMPT[:24], knob)
        world.admit(req)
        assert world.prefill(req, 0, 24)
        scores = Request.of(req).scores
        assert isinstance(scores, HeldScores)
        found[power] = torch.stack([torch.stack(layer) for layer in scores._scores])
        world.give_up(req, 0)
    weights = profile / profile.mean()
    torch.testing.assert_close(found[1.0], found[0.0] * weights[..., None])
