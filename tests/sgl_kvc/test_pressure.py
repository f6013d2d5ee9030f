"""Requests that are compressed when memory is short, and not before."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request
from sgl_kvc.spec import SpecError, parse
from tests import tiny_models
from tests.sgl_kvc.documents import end
from tests.sgl_kvc.lives import PAGE, ROWS
from tests.sgl_kvc.test_request import blocks_held, run

KNOB = {
    "on_pressure": 4, "policy": "streaming-llm", "min_tokens": 0, "sinks": 1, "recent": 2,
}  # fmt: skip
PROMPT, SEGMENT = 32, 2  # tokens, and blocks of their segment


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


def start(world, number: int, **knob):
    return run(world, [100 * number + i for i in range(PROMPT)], KNOB | knob)


def compressed(req) -> bool:
    return Request.of(req).segment is not None


def report(req) -> dict:
    return Request.of(req).report.to_json()


def test_with_memory_enough_it_stays_whole(checked_lives):
    req = start(checked_lives.world, 1)
    for _ in range(2 * PAGE):
        checked_lives.world.decode()
    assert not compressed(req)
    told = report(req)
    assert (told["rate"], told["on_pressure"], told["skipped"]) == (1, 4, None)
    assert told["blocks"]["after"] == told["blocks"]["before"]


def test_the_oldest_comes_first_and_no_more_than_needed(checked_lives):
    world = checked_lives.world
    reqs = [start(world, number) for number in (1, 2, 3)]
    before = blocks_held(world)
    assert world.cache.relieve(world.live, 0, once=True)
    assert [compressed(req) for req in reqs] == [True, False, False]
    assert before - blocks_held(world) == PROMPT // PAGE - SEGMENT
    assert world.cache.take_released()
    assert not world.cache.relieve(world.live, 0)
    assert [compressed(req) for req in reqs] == [True, False, False]
    told = report(reqs[0])
    assert (told["rate"], told["on_pressure"], told["blocks"]["after"]) == (4, 4, SEGMENT)
    checked_lives.contents()
    for _ in range(2 * PAGE):
        world.decode()


@pytest.mark.parametrize("policy", ["streaming-llm", "kv-compress", "h2o"])
def test_it_keeps_what_it_would_have_kept_at_once(checked_lives, policy):
    """Of the prompt; and all that was decoded meanwhile."""
    world = checked_lives.world
    knob = {"policy": policy, "recent": 2, "sinks": 1, "min_tokens": 0}
    late = run(world, list(range(PROMPT)), knob | {"on_pressure": 4})
    expected = Request.of(late).scores.select()
    for _ in range(PAGE + 1):
        world.decode()
    assert world.cache.relieve(world.live, PAGE, once=True)
    begin = 0
    for pages, held in zip(expected.pages.tolist(), checked_lives.positions(late), strict=True):
        mine = expected.positions[begin : begin + pages * PAGE].tolist()
        begin += pages * PAGE
        assert held == [*mine, *range(PROMPT, PROMPT + PAGE + 1)]


def test_nobody_is_retracted_who_can_be_compressed(checked_lives):
    world = checked_lives.world  # 40 blocks
    reqs = [start(world, number) for number in range(1, 5)]
    for step in range(4 * PAGE):
        assert not world.decode(), step
        checked_lives.accounting()
    assert any(map(compressed, reqs))
    checked_lives.contents()


def test_they_are_compressed_again_the_least_recently_compressed_first(checked_lives):
    world = checked_lives.world
    reqs = [start(world, number, recompress_every=2 * PAGE) for number in (1, 2, 3)]
    for _ in reqs:
        assert world.cache.relieve(world.live, 0, once=True)
    assert all(map(compressed, reqs))
    assert not world.cache.relieve(world.live, 0, once=True), "nobody has gone on since"
    for times in ([1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]):
        for _ in range(2 * PAGE):
            world.decode()  # all are due again, and those that were not chosen before, too
        before = blocks_held(world)
        assert world.cache.relieve(world.live, 0, once=True)
        assert [report(req)["decode"]["recompressed"] for req in reqs] == times
        assert blocks_held(world) < before
        checked_lives.contents()


@pytest.mark.parametrize("every", [0, 2 * PAGE])
@pytest.mark.parametrize(
    ("policy", "again"),
    [("streaming-llm", True), ("kv-compress", True), ("h2o", True), ("r-kv", False)],
)
def test_long_answers_stay_where_they_may_be_compressed_again(
    checked_lives, policy, again, every
):
    """Not where the policy has to know beforehand; with `recompress_every` that is refused."""
    if every and not again:
        return
    world, retracted = checked_lives.world, 0
    more = {"policy": policy, "recompress_every": every}
    more |= {"window": 2} if policy in ("kv-compress", "r-kv") else {}
    reqs = [start(world, number, **more) for number in range(1, 5)]
    for _ in range(11 * PAGE):
        retracted += len(world.decode())
        checked_lives.accounting()
        checked_lives.contents()
    assert bool(retracted) is not again
    if again:
        assert all(report(req)["decode"]["recompressed"] for req in reqs)


def test_again_comes_only_before_a_retraction_and_the_least_recently_compressed_first(
    checked_lives,
):
    """Who waits to be let in is no reason, unless `recompress_every` says so."""
    world, times = checked_lives.world, []
    reqs = [start(world, number) for number in range(1, 5)]
    while world.cache.relieve(world.live, 0, once=True):
        pass
    assert all(map(compressed, reqs))
    for _ in range(2 * PAGE):
        world.decode()
        assert not world.cache.relieve(world.live, 0, once=True)
    while not any(times):
        assert not world.decode()
        times = [report(req)["decode"]["recompressed"] for req in reqs]
        free = world.cache.free_tokens()
    assert times[0] == 1, times
    assert times == sorted(times, reverse=True)
    assert free < 2 * len(reqs) * PAGE + ROWS * PAGE
    order = [Request.of(req).compressed_at for req in reqs[: sum(times)]]
    assert order == sorted(order)


def test_attention_counts_from_when_memory_becomes_short(checked_lives):
    """Not before: it slows decode down. What it paid until then is not known, and zero."""
    world = checked_lives.world
    req = start(world, 1, policy="kv-compress", window=2)
    row, pool, request = req.req_pool_idx, world.pool, Request.of(req)
    assert world.cache.relieve(world.live, 0, once=True)
    assert not pool.spans.tracks_attention(row)
    assert len(request.segment.slots) == SEGMENT * PAGE
    pool.metric[world.cache.row_slots(req)[PROMPT] // PAGE] = 9  # of who had the block before
    for _ in range(PAGE + 1):
        world.decode()
        assert not pool.spans.tracks_attention(row)
    held = pool.metric[request.segment.slots[::PAGE] // PAGE].clone()
    assert held.amax() > 0, "the prompt's scores"
    hog = world.allocator.alloc(world.allocator.available_size() - PAGE)
    world.cache.relieve(world.live, 0)
    assert pool.spans.tracks_attention(row)
    assert request.counted_from == req.kv_committed_len
    assert torch.equal(pool.metric[request.segment.slots[::PAGE] // PAGE], held)
    tail = world.cache.row_slots(req)[PROMPT : req.kv_committed_len].long()
    assert not pool.metric[tail // PAGE, :, :, tail % PAGE].any()
    assert report(req)["decode"]["recompressed"] == 0, "no query was seen yet"
    world.allocator.free(hog)


def test_a_prompt_that_gains_nothing_is_not_copied_under_pressure(checked_lives):
    """Compression in decode gives every prompt blocks of its own; not where memory is short."""
    world = checked_lives.world
    req = run(world, list(range(PAGE)), KNOB | {"recompress_every": PAGE})
    assert not world.cache.relieve(world.live, 0, once=True)
    assert "nothing to remove" in report(req)["skipped"]


def test_without_it_they_are_retracted(checked_lives):
    world = checked_lives.world
    for number in range(1, 5):
        run(world, [100 * number + i for i in range(PROMPT)], None)
    assert any(world.decode() for _ in range(4 * PAGE))


def test_a_retracted_request_waits_anew(checked_lives):
    world = checked_lives.world
    req = start(world, 1)
    assert world.cache.relieve(world.live, 0, once=True)
    world.decode()
    world.retract(world.live.pop())
    assert not compressed(req)
    done = world.admit(req)
    assert world.prefill(req, done, req.seqlen)
    world.cache.cache_unfinished_req(req)
    world.live.append(req)
    assert report(req)["rate"] == 1
    assert world.cache.relieve(world.live, 0, once=True)


def test_what_it_saw_of_all_queries_is_remembered_whole(checked_lives):
    """Not what is left of it once it is chosen what to keep."""
    world, tokens = checked_lives.world, list(range(PROMPT))
    knob = {"on_pressure": 4, "policy": "h2o", "recent": 2, "sinks": 1, "min_tokens": 0}
    end(world, run(world, tokens, knob))
    again = world.request(tokens, knob)
    assert world.admit(again) > 0
    assert all(state is not None for state in Request.of(again).known)
    world.cache.dec_lock_ref(again.last_node)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"rate": 2}, "on_pressure"), ({"budget": 64}, "budget"), ({"max_rate": 8}, "max_rate"),
        ({"question_tokens": 3}, "on_pressure"), ({"question": "last_message"}, "on_pressure"),
        ({"recompress_every": 16, "policy": "r-kv"}, "recompress_every"),
        ({"reuse": "both"}, "on_pressure"),
        ({"on_pressure": 0.5}, "on_pressure"), ({"on_pressure": 2000}, "on_pressure"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused(more, field):
    with pytest.raises(SpecError) as caught:
        parse({"on_pressure": 4, "policy": "kv-compress"} | more)
    assert caught.value.name == field


def test_it_survives_json():
    spec = parse({"on_pressure": 4})
    assert (spec.rate, spec.on_pressure) == (4, True)
    assert spec.to_json()["on_pressure"] == 4
    assert "rate" not in spec.to_json()
    assert parse(spec.to_json()) == spec
    assert parse({"on_pressure": 1}).off
