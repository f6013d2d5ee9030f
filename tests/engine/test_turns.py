"""Chats whose turns begin with what the turn before has left, on the real engine."""

from __future__ import annotations

import pytest

from tests.engine.conftest import prompt
from tests.servers import Engine, assert_no_leak

KNOB = {"rate": 8, "policy": "kv-compress"}


def flush(server: Engine) -> None:
    assert server.client().post("/flush_cache", params={"timeout": 10}).status_code == 200


def chat(server: Engine, name: str, turns: int, knob: dict, crowd: int = 0) -> list[dict]:
    """The answer of every turn. Between them `crowd` others fill the pool."""
    said, answers = prompt(900, seed=name), []
    for turn in range(turns):
        said = [*said, *prompt(30, seed=f"{name} {turn}")]
        answer = server.generate(said, knob, max_new_tokens=10, ignore_eos=True)
        answers.append(answer | {"prompt": len(said)})
        said += answer["output_ids"]
        for other in range(crowd):
            server.generate(prompt(1900, seed=f"{name} {turn} {other}"), max_new_tokens=1)
    return answers


def test_a_turn_prefills_only_what_is_new(server):
    flush(server)
    answers = chat(server, "new", 4, KNOB | {"reuse": "compressed"})
    begun = [answer["kv_compression"].get("begun_with") for answer in answers]
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert begun == [None, 928, 960, 1008]
    assert cached == sorted(cached)
    for answer, before in zip(answers[1:], answers, strict=False):
        assert answer["prompt"] - answer["meta_info"]["cached_tokens"] < 30 + 2 * 16
        assert answer["kv_compression"]["blocks"]["after"] <= before["prompt"] // 16 // 8 + 3
    assert_no_leak(server)


@pytest.mark.parametrize(
    ("reuse", "hold_s", "kept"),
    [("full", 0, False), ("compressed", 0, False), ("compressed", 600, True), ("both", 600, True)],
)
def test_what_is_held_is_there_after_others_have_filled_the_pool(server, reuse, hold_s, kept):
    flush(server)
    name, knob = f"crowd {reuse} {hold_s}", KNOB | {"reuse": reuse, "hold_s": hold_s}
    answers = chat(server, name, 3, knob, crowd=9)
    for answer in answers[1:]:
        assert (answer["meta_info"]["cached_tokens"] >= 900) is kept
    assert_no_leak(server)


def test_who_does_not_ask_for_it_gets_the_same_as_ever(server):
    """Whatever compressed turns of the same chat are there."""
    flush(server)
    alone = chat(server, "same", 3, KNOB)
    flush(server)
    chat(server, "same", 3, KNOB | {"reuse": "compressed"})
    again = chat(server, "same", 3, KNOB)
    assert [each["output_ids"] for each in again] == [each["output_ids"] for each in alone]
    assert [each["kv_compression"] for each in again] == [each["kv_compression"] for each in alone]
    assert "begun_with" not in again[-1]["kv_compression"]
