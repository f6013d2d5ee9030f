"""One object per request: what it makes of its knob, and what its states are known by."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sgl_kvc.cache.request import Request, missing_facts
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.spec import OFF, parse
from tests import tiny_models
from tests.sgl_kvc.lives import World

PAGE = 16
TOKENS = list(range(100, 200))
FACTS = ModelFacts()


@pytest.fixture(scope="module", autouse=True)
def server_args(tmp_path_factory):
    model = tiny_models.write(tmp_path_factory.mktemp("model"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))


@pytest.fixture(scope="module")
def world(server_args) -> World:
    return World(20)


def new(world: World, knob: dict | None, tokens: list[int] = TOKENS):
    """SGLang's request and ours."""
    req = world.request(tokens, knob)
    req.full_untruncated_fill_ids = req.origin_input_ids
    return req, Request.of(req)


def test_it_is_made_once(world):
    req, request = new(world, {"rate": 8})
    assert Request.of(req) is request is req.kvc
    assert request.spec == parse({"rate": 8})
    assert request.unusable is None
    assert (request.row, request.extent, request.scores, request.segment) == (None,) * 4
    assert request.report is None
    assert request.block_digests == []


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"kv_compression": None}, "text", [1]])
def test_without_a_knob_nothing_is_asked_for(world, params):
    req = world.request(TOKENS, None)
    req.sampling_params.custom_params = params
    request = Request.of(req)
    assert request.spec == OFF
    assert request.unusable is None


def test_a_knob_that_cannot_be_used_is_as_none(world):
    _, request = new(world, {"rate": 0})
    assert request.spec is OFF
    assert request.unusable == "kv_compression.rate: must be at least 1, which means off (got 0)"


@pytest.mark.parametrize(
    ("knob", "goes_on"),
    [({"rate": 8, "recompress_every": 64}, True), ({"rate": 8}, False), (None, False)],
)
def test_whether_it_goes_on(world, knob, goes_on):
    req, request = new(world, knob)
    assert not request.goes_on, "before it is known what is compressed"
    request.measure(req, PAGE, None, FACTS)
    assert request.goes_on is goes_on
    request.extent = None
    assert request.measure(req, PAGE, "no", FACTS).skipped == ("no" if knob else None)
    assert not request.goes_on


def test_it_is_measured_anew_when_the_prompt_has_grown(world):
    """After a retraction what was generated belongs to what is prefilled."""
    req, request = new(world, {"rate": 4, "min_tokens": 0})
    extent = request.measure(req, PAGE, None, FACTS)
    assert (extent.prompt_tokens, extent.end, extent.page_size) == (100, 96, PAGE)
    assert request.measure(req, PAGE, "too late", FACTS) is extent is request.extent
    req.full_untruncated_fill_ids = req.origin_input_ids + type(req.origin_input_ids)("q", [7] * 40)
    grown = request.measure(req, PAGE, None, FACTS)
    assert (grown.prompt_tokens, grown.end) == (140, 128)
    assert len(request.prompt(req)) == 140


def test_a_question_stays_where_it_was(world):
    req, request = new(world, {"rate": 4, "min_tokens": 0, "question_tokens": 10})
    req.full_untruncated_fill_ids = req.origin_input_ids + type(req.origin_input_ids)("q", [7] * 40)
    assert request.prompt(req) is req.origin_input_ids
    assert request.measure(req, PAGE, None, FACTS).end == 80


def test_a_policy_without_what_it_needs(world):
    knob = {"rate": 4, "min_tokens": 0, "policy": "razor-attention"}
    req, request = new(world, knob)
    reason = "head-profile needs the model's head profile; there is none"
    assert missing_facts(request.spec, FACTS) == reason
    assert request.measure(req, PAGE, None, FACTS).skipped == reason
    request.extent = None
    assert request.measure(req, PAGE, "something worse", FACTS).skipped == "something worse"
    request.extent = None
    known = ModelFacts(head_profile=torch.ones(2, 3))
    assert missing_facts(request.spec, known) is None
    assert request.measure(req, PAGE, None, known).skipped is None
    scorer = parse({"rate": 4, "scorer": "expected-attention", "apportioner": "uniform"})
    assert missing_facts(scorer, FACTS) == (
        "expected-attention needs the model's cos sin; there is none"
    )


KNOB = {"rate": 4, "min_tokens": 0, "policy": "h2o"}


def key_of(world: World, knob: dict = KNOB, tokens: list[int] = TOKENS, **attributes):
    req, request = new(world, knob, tokens)
    for name, value in attributes.items():
        setattr(req, name, value)
    request.measure(req, PAGE, None, FACTS)
    return request.states_key(req)


def test_states_are_known_by_what_they_follow_from(world):
    """By the prompt and what the scorer was told; not by how much is kept of it."""
    key = key_of(world)
    assert hash(key) == hash(key_of(world))
    for same in (KNOB | {"rate": 8}, KNOB | {"recent": 5}, KNOB | {"min_tokens": 9}):
        assert key_of(world, same) == key
    others = [
        key_of(world, tokens=[*TOKENS[:-1], 5]),
        key_of(world, tokens=[5, *TOKENS[1:]]),
        key_of(world, tokens=TOKENS[:-1]),
        key_of(world, tokens=[*TOKENS, 5]),
        key_of(world, extra_key="tenant"),
        key_of(world, KNOB | {"sinks": 9}),
        key_of(world, KNOB | {"norm": "l2"}),
        key_of(world, {"rate": 4, "min_tokens": 0, "policy": "kvc-full"}),
    ]
    assert len({key, *others}) == len(others) + 1


def test_the_key_leaves_out_the_question(world):
    knob = KNOB | {"question_tokens": 10}
    assert key_of(world, knob) == key_of(world, knob, [*TOKENS[:90], *range(10)])
    assert key_of(world, knob) != key_of(world, knob, [5, *TOKENS[1:]])


def test_the_key_follows_the_prompt(world):
    req, request = new(world, KNOB)
    request.measure(req, PAGE, None, FACTS)
    before = request.states_key(req)
    assert request.states_key(req) is before, "it is digested once"
    req.full_untruncated_fill_ids = req.origin_input_ids + type(req.origin_input_ids)("q", [7] * 40)
    request.retract()
    request.measure(req, PAGE, None, FACTS)
    assert request.states_key(req) != before


def test_a_retracted_request_forgets_what_belonged_to_its_memory(world):
    req, request = new(world, KNOB)
    request.measure(req, PAGE, None, FACTS)
    request.row, request.segment, request.scores = 1, "segment", "scores"
    request.block_digests = [1]
    request.report = report = object()
    request.retract()
    assert (request.row, request.extent, request.scores, request.segment) == (None,) * 4
    assert request.block_digests == []
    assert request.report is report, "its response has yet to tell it"
