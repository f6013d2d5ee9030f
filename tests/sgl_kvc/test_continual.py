"""Compression that has to wait for room, goes on in decode, or is not worth it."""

from __future__ import annotations

import pytest

from sgl_kvc.cache.request import Request
from tests.sgl_kvc.lives import PAGE
from tests.sgl_kvc.test_cache import Lives, server_args  # noqa: F401


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
