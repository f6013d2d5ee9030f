"""Compression that has to wait for room, goes on in decode, or is not worth it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sgl_kvc.cache import continual, repack
from sgl_kvc.cache.repack import held_pages
from sgl_kvc.cache.request import Request
from sgl_kvc.policy.base import HeldContext
from sgl_kvc.policy.facts import ModelFacts
from tests.sgl_kvc.lives import HEADS, LAYERS, PAGE, World, kv, tokens_of
from tests.sgl_kvc.test_cache import Lives, server_args  # noqa: F401
from tests.sgl_kvc.test_request import run


@pytest.fixture
def lives() -> Lives:
    lives = Lives()
    lives.build()
    return lives


def report_of(req) -> dict:
    return Request.of(req).report.to_json()


@pytest.mark.parametrize("while_the_question_is_read", [True, False])
def test_compressed_as_soon_as_there_is_room(lives, while_the_question_is_read):
    """The pool is full when the context was read, until another request ends."""
    lives.start(family=0, shared=90, own=0, knob=None, chunk=0, keep=True)
    knob = {"rate": 1.5, "min_tokens": 0, "question_tokens": 7, "recompress_every": 8}
    knob["policy"] = "kv-compress"
    lives.start(1, 60, 0, knob, 0, keep=True, other_ends=while_the_question_is_read)
    req = lives.world.live[-1]
    if not while_the_question_is_read:
        assert report_of(req)["skipped"] == "no free blocks to compress into"
        lives.decode(steps=2)
        assert report_of(req)["skipped"] == "no free blocks to compress into"
        lives.finish(which=0, insert=False)
    lives.decode(steps=12)
    assert report_of(req)["skipped"] is None
    assert report_of(req)["decode"]["recompressed"] >= 1
    lives.accounting()
    lives.contents()
    lives.teardown()


def test_streaming_llm_slides_its_window_in_decode(lives):
    """Sinks and the newest keys, of every head; attention has no say."""
    knob = {"budget": 16, "policy": "streaming-llm", "recompress_every": 8, "min_tokens": 0}
    lives.start(0, 60, 0, knob, 0, keep=True)
    lives.decode(steps=40)
    req = lives.world.live[0]
    assert report_of(req)["decode"]["recompressed"] >= 3
    for kept in lives.positions(req):
        newest = len(kept) - 4
        assert 0 < newest < 16 + 8 + PAGE
        length = req.kv_committed_len
        assert kept == [*range(4), *range(length - newest, length)]
    lives.teardown()


@pytest.mark.parametrize("other_ends", [True, False])
def test_a_context_that_was_not_worth_compressing_stays_whole(lives, other_ends):
    """Others shared it then; its scores are gone when one of them ends meanwhile."""
    lives.start(0, 2 * PAGE, 0, None, 0, keep=True)
    lives.start(0, 2 * PAGE, 0, None, 0, keep=True)
    knob = {"rate": 2, "min_tokens": 0, "question_tokens": 30, "policy": "random"}
    lives.start(0, 38, 0, knob, 0, keep=True, other_ends=other_ends)
    req = lives.world.live[-1]
    assert "its share of the 2 it holds" in report_of(req)["skipped"]
    lives.decode(steps=3)
    assert Request.of(req).segment is None
    lives.accounting()
    lives.contents()
    lives.teardown()


# --- scores made anew --------------------------------------------------------------------------


class Rescored:
    """A scorer's `rescore` that notes what it is given and prefers the keys it is told to."""

    def __init__(self, monkeypatch):
        self.seen: list[HeldContext] = []
        method = continual.scorer
        monkeypatch.setattr(
            continual, "scorer", lambda spec: dataclasses.replace(method(spec), rescore=self)
        )

    def __call__(self, context: HeldContext) -> torch.Tensor:
        self.seen.append(context)
        n = context.held.shape[1]
        return (torch.arange(n) % 3 == 0).float().expand(context.held.shape)


GOES_ON = {"policy": "r-kv", "budget": 16, "min_tokens": 0, "sinks": 0, "recent": 0, "window": 3}

_ANGLES = torch.outer(torch.arange(128), torch.tensor([1.0, 0.01]))
ROTATION = ModelFacts(cos_sin=torch.cat((_ANGLES.cos(), _ANGLES.sin()), -1))


def test_a_scorer_sees_the_keys_that_are_held_and_what_it_says_is_kept(lives, monkeypatch):
    rescored = Rescored(monkeypatch)
    lives.start(0, 60, 0, GOES_ON | {"recompress_every": 9}, 0, keep=True)
    req = lives.world.live[0]
    lives.decode(steps=12)  # 12 tokens are whole blocks, more than 9
    before, length = lives.positions(req), req.kv_committed_len
    assert not rescored.seen
    lives.decode(steps=1)
    assert len(rescored.seen) == LAYERS
    after, expected = lives.positions(req), kv(tokens_of(req)[:length])
    for layer, context in enumerate(rescored.seen):
        assert context.length == length
        for head in range(HEADS):
            mine = [p for p in before[layer * HEADS + head] if p < length // PAGE * PAGE]
            there = context.held[head]
            assert int(there.sum()) == len(mine)
            assert torch.equal(context.keys[head][there], expected[mine, layer, head])
            places = there.nonzero().flatten().tolist()
            wanted = [p for place, p in zip(places, mine, strict=True) if place % 3 == 0]
            kept = [p for p in after[layer * HEADS + head] if p < length // PAGE * PAGE]
            assert len(kept) == 16
            assert set(wanted[:16]) <= set(kept)


@pytest.mark.parametrize("every", [9, 30])
def test_only_what_the_last_queries_paid_counts(lives, monkeypatch, every):
    """Every step pays up to a tenth; 3 queries are looked at."""
    rescored = Rescored(monkeypatch)
    lives.start(0, 60, 0, GOES_ON | {"recompress_every": every}, 0, keep=True)
    lives.decode(steps=40)
    assert len(rescored.seen) >= LAYERS
    for context in rescored.seen:
        paid = context.attention[context.held]
        assert 0.2 < float(paid.max()) <= 0.3
        assert (paid > 0).float().mean() > 0.9


def test_where_it_is_due_sooner_than_the_window_is_long_all_counts(lives, monkeypatch):
    rescored = Rescored(monkeypatch)
    knob = GOES_ON | {"window": 50, "recompress_every": 4}
    lives.start(0, 60, 0, knob, 0, keep=True)
    lives.decode(steps=13)
    assert len(rescored.seen) == 3 * LAYERS
    for context in rescored.seen:
        assert float(context.attention[context.held].max()) <= 0.4


def test_what_was_seen_of_the_prompt_is_there_in_decode(lives, monkeypatch):
    rescored = Rescored(monkeypatch)
    lives.world.pool.facts = ROTATION
    knob = GOES_ON | {"policy": "triattention", "recompress_every": 4}
    knob.pop("window")
    lives.start(0, 60, 0, knob, 0, keep=True)
    lives.decode(steps=6)
    assert [context.state.count for context in rescored.seen] == [60] * LAYERS
    Request.of(lives.world.live[0]).retract()
    assert Request.of(lives.world.live[0]).states is None


def test_scores_made_anew_begin_with_no_attention(lives):
    """Neither the prompt's scores nor what the blocks' last owner was paid."""
    pool = lives.world.pool
    pool.metric.fill_(7)
    lives.start(0, 62, 0, GOES_ON | {"recompress_every": 9}, 0, keep=True)
    req = lives.world.live[0]
    slots = lives.world.cache.row_slots(req)[Request.of(req).segment.row_begin : 62].long()
    assert len(slots) == 16 + 2
    assert not pool.metric[slots // PAGE, :, :, slots % PAGE].any()


@pytest.mark.parametrize("knob", [{"policy": "triattention"}, {"policy": "h2o"},
                                  {"policy": "h2o", "recompress_every": 4}])  # fmt: skip
def test_what_was_seen_of_the_prompt_goes_where_decode_does_not_ask_for_it(lives, knob):
    lives.world.pool.facts = ROTATION
    lives.start(0, 60, 0, {"budget": 16, "min_tokens": 0} | knob, 0, keep=True)
    request = Request.of(lives.world.live[0])
    assert request.segment is not None
    assert (request.states, request.scores) == (None, None)


def test_the_oldest_page_of_a_head_may_be_kept_again(lives):
    """By its metric alone: no sinks, no recent keys."""
    knob = {"budget": 12, "recompress_every": 8, "sinks": 0, "recent": 0}
    lives.start(0, 60, 0, knob, 0, keep=True)
    req, pool = lives.world.live[0], lives.world.pool
    oldest = [kept[:PAGE] for kept in lives.positions(req)]
    pages, first = held_pages(pool, req.req_pool_idx, Request.of(req).segment, 60)
    pool.metric.zero_()
    pool.metric.flatten(0, 2)[pages[torch.arange(len(first)), first]] = 100
    lives.decode(steps=9)
    assert report_of(req)["decode"]["recompressed"] == 1
    assert [kept[:PAGE] for kept in lives.positions(req)] == oldest
    lives.teardown()


def test_what_selection_is_told_when_it_is_compressed_again(monkeypatch):
    """What lies around: the shared prefix before, and behind it what no whole block holds."""
    world, told, select = World(40), {}, repack.select
    monkeypatch.setattr(
        repack, "select", lambda *given, **how: told.update(how) or select(*given, **how)
    )
    knob = {"rate": 2, "recompress_every": 8, "prefix_tokens": 16, "sinks": 2, "recent": 2}
    req = run(world, list(range(100, 132)), knob)
    world.pool.facts = ModelFacts(neox=False)
    allocate, world.cache.allocate = world.cache.allocate, lambda tokens: None
    for _ in range(9):  # one more than needed: there is no room
        world.decode()
    world.cache.allocate = allocate
    world.decode()
    assert (told["before"], told["tail"]) == (16, 1)
    assert told["facts"] is world.pool.facts
    segment = Request.of(req).segment
    assert (segment.begin, segment.end) == (16, 40)
    assert segment.blocks == 3, "half of the 6 behind the prefix"
    assert segment.spec is Request.of(req).spec
