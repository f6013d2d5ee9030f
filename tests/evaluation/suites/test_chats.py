"""Chats: turns about one document, each with what was said before."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from kvc_eval.grid import TURNS, Cell
from kvc_eval.measure import _missing
from kvc_eval.store import Record, Store
from kvc_eval.suites.chats import Chats
from kvc_recall.tasks import words
from kvc_server.settings import SettingsError

from tests.evaluation.records import GRID


def test_every_turn_begins_with_the_one_before() -> None:
    suite = Chats(seed=3)
    turns = [suite.sample(512, index) for index in range(suite.turns)]
    assert words(turns[0].prompt or "") + 1 == 512  # and <bos>
    assert len({turn.document for turn in turns}) == 1
    assert len({turn.question for turn in turns}) == suite.turns
    for before, after in itertools.pairwise(turns):
        said = f"{before.prompt} {before.answers[0]} <eos> "
        assert (after.prompt or "").startswith(said)
        assert after.turns == (*before.turns, (before.question, before.answers[0]))
    last = turns[-1]
    apart = (last.prompt or "").removeprefix(last.document)
    assert words(apart) == last.question_tokens
    assert suite.sample(512, suite.turns).document != last.document


def test_fewer_turns_are_the_first_ones() -> None:
    assert Chats(("turn1", "turn2")).sample(512, 3) == Chats().sample(512, 9)
    with pytest.raises(SettingsError, match="turn1"):
        Chats(("turn2",))


def test_a_chat_that_was_left_is_asked_from_its_beginning(tmp_path: Path) -> None:
    plain, turns = Cell(1024, "inside", "a", 8), Cell(1024, TURNS, "a", 8)
    store = Store(tmp_path, GRID)
    for cell in (plain, turns):
        store.add(Record(cell, index, "turn", score=1.0) for index in range(12) if index != 5)
    assert _missing(plain, 4, range(12), store) == [5]
    assert _missing(turns, 4, range(12), store) == [4, 5, 6, 7]


def test_a_turn_says_what_it_begins_with() -> None:
    assert Cell(1024, TURNS, "kv-compress", 8).knob(9)["reuse"] == "compressed"
