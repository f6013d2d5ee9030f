"""What a knob means, and what is said of one that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_kvc.spec import (
    DEFAULT_POLICY,
    DEFAULT_QUESTION_APART,
    FIELDS,
    MIN_RECENT,
    OFF,
    PRESETS,
    CompressionSpec,
    Parameter,
    SpecError,
    methods,
    parse,
    parse_rate,
    policy_parameters,
)
from sgl_kvc.spec.checks import integer, one_of, parameter_value, short

NO_SIZE = "one of rate, on_pressure and budget is required"
EITHER = "give either policy or scorer and apportioner, not both"
RATE = "must be a finite number, KVs before / KVs after (got {})"
OWN = {"rate": 8, "scorer": "attention-window", "apportioner": "uniform"}


def refusal(knob: Any, **how: Any) -> tuple[str, str]:
    """Field and problem."""
    with pytest.raises(SpecError) as caught:
        parse(knob, **how)
    return caught.value.name, caught.value.problem


@pytest.mark.parametrize(
    ("knob", "field", "problem"),
    [
        ([], "", 'must be an object such as {"rate": 8}, or null'),
        ("8", "", 'must be an object such as {"rate": 8}, or null'),
        ({}, "rate", NO_SIZE),
        ({"rate": None, "policy": "snapkv"}, "rate", NO_SIZE),
        ({"rate": 8, "budget": 8}, "budget", "give either rate or budget, not both"),
        ({"rate": 8, "policy": "snapkv", "scorer": "tova"}, "scorer", EITHER),
        ({"rate": 8, "policy": "snapkv", "apportioner": "uniform"}, "apportioner", EITHER),
        ({"rate": 8, "scorer": "tova"}, "apportioner", "is required beside scorer"),
        ({"rate": 8, "apportioner": "uniform"}, "scorer", "is required beside apportioner"),
        ({"rate": "8"}, "rate", RATE.format("'8'")),
        ({"rate": True}, "rate", RATE.format("True")),
        ({"rate": float("nan")}, "rate", RATE.format("nan")),
        ({"rate": 0.99}, "rate", "must be at least 1, which means off (got 0.99)"),
        ({"rate": 1024.5}, "rate", "must be at most 1024 on this server (got 1024.5)"),
        ({"rate": float("inf")}, "rate", "must be at most 1024 on this server (got inf)"),
        ({"budget": 0}, "budget", "must be a whole number from 1 to 16777216 (got 0)"),
        ({"budget": 1.5}, "budget", "must be a whole number from 1 to 16777216 (got 1.5)"),
        ({"budget": True}, "budget", "must be a whole number from 1 to 16777216 (got True)"),
        ({"rate": 8, "sinks": 4097}, "sinks", "must be a whole number from 0 to 4096 (got 4097)"),
        ({"rate": 8, "recent": -1}, "recent", "must be a whole number from 0 to 4096 (got -1)"),
        ({"rate": 8, "force": 1}, "force", "unknown force 1; known are False, True"),
        ({"rate": 8, "question": "first"}, "question",
         "unknown question 'first'; known are last_message"),
        ({"rate": 8, "question": "last_message", "question_tokens": 3}, "question",
         "give either question or question_tokens, not both"),
        ({"rate": 8, "pool": 8}, "pool", "must be 1 plus a multiple of 2 (got 8)"),
        ({"rate": 8, "pooling": "sum"}, "pooling",
         "unknown pooling 'sum'; known are " + ", ".join(
             methods("scorers")["attention-window"].parameters["pooling"].choices)),
        ({"rate": 8, "policy": "snap"}, "policy",
         f"unknown policy 'snap'; known are {', '.join(sorted(PRESETS))}"),
        (OWN | {"scorer": "sight"}, "scorer",
         f"unknown scorer 'sight'; known are {', '.join(sorted(methods('scorers')))}"),
        (OWN | {"apportioner": 3}, "apportioner",
         f"unknown apportioner 3; known are {', '.join(sorted(methods('apportioners')))}"),
        (OWN | {"mode": "fast"}, "mode", "unknown field; for this policy they are "
         + ", ".join([*FIELDS, *policy_parameters("attention-window", "uniform")])),
        ({"rate": 8, 3: None}, "3", "unknown field; for this policy they are "
         + ", ".join([*FIELDS, *policy_parameters("attention-window", "global")])),
        ({"rate": 8, "policy": "tova", "recompress_every": 8}, "recompress_every",
         "scorer tova cannot go on during decode; " + ", ".join(
             name for name, m in methods("scorers").items() if m.continual) + " can"),
        (OWN | {"apportioner": "adaptive", "recompress_every": 8}, "recompress_every",
         "apportioner adaptive cannot go on during decode; " + ", ".join(
             name for name, m in methods("apportioners").items() if m.continual) + " can"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_said_of_a_knob_that_cannot_be_used(knob, field, problem):
    assert refusal(knob) == (field, problem)


def test_the_servers_ceiling():
    assert parse({"rate": 64}, max_rate=64).rate == 64
    assert refusal({"rate": 65}, max_rate=64) == (
        "rate", "must be at most 64 on this server (got 65)"
    )  # fmt: skip
    assert parse_rate(2.5, max_rate=2.5) == 2.5
    assert isinstance(parse_rate(2), float)
    with pytest.raises(SpecError, match=r"at most 1\.5 on"):
        parse_rate(2, max_rate=1.5)


def test_the_default_is_another_where_the_question_comes_later():
    for apart in ({"question_tokens": 40}, {"question": "last_message"}):
        spec = parse({"rate": 8} | apart)
        assert spec.policy == DEFAULT_QUESTION_APART
        assert parse(spec.to_json()) == spec
    for inside in ({"question_tokens": 0}, {"question_tokens": None}, {"question": None}):
        assert parse({"rate": 8} | inside).policy == DEFAULT_POLICY
    assert parse({"rate": 8, "question_tokens": 40, "policy": "snapkv"}).policy == "snapkv"
    assert parse(OWN | {"rate": 8, "question_tokens": 40}).policy == parse(OWN).policy


def test_what_a_plain_rate_means():
    spec = parse({"rate": 8})
    preset = PRESETS["kv-compress"]
    assert spec == CompressionSpec(
        rate=8.0, budget=None, policy="kv-compress", scorer=preset.scorer,
        apportioner=preset.apportioner, parameters=spec.parameters, sinks=4, recent=32,
        min_tokens=64, prefix_tokens=0, question_tokens=0, recompress_every=0, prefill_block=0,
    )  # fmt: skip
    defaults = policy_parameters(preset.scorer, preset.apportioner)
    assert spec.parameters == {n: p.default for n, p in defaults.items()} | preset.parameters
    assert spec.window == 32
    assert not spec.off
    assert not spec.all_queries


@pytest.mark.parametrize("knob", [None, {"rate": 1}, {"rate": 1.0, "policy": "snapkv"}])
def test_off(knob):
    assert parse(knob).off
    assert parse(None) is OFF


def test_null_is_as_not_given():
    given = {"rate": 8, "budget": None, "policy": None, "scorer": None, "window": None,
             "sinks": None}  # fmt: skip
    assert parse(given) == parse({"rate": 8})


def test_numbers_that_are_whole():
    spec = parse({"budget": 9.0, "sinks": 0, "recent": 0, "min_tokens": 1, "prefix_tokens": 2,
                  "question_tokens": 3, "recompress_every": 4})  # fmt: skip
    assert (spec.rate, spec.budget, spec.sinks, spec.recent) == (None, 9, 0, 0)
    later = (spec.min_tokens, spec.prefix_tokens, spec.question_tokens, spec.recompress_every)
    assert later == (1, 2, 3, 4)
    assert isinstance(spec.budget, int)
    largest = 1 << 24
    for field in ("budget", "min_tokens", "prefix_tokens", "question_tokens"):
        assert getattr(parse({"rate": 8, field: largest} if field != "budget" else
                             {field: largest}), field) == largest  # fmt: skip
        assert refusal({field: largest + 1, **({} if field == "budget" else {"rate": 8})}) == (
            field,
            f"must be a whole number from {int(field == 'budget')} to {largest} "
            f"(got {largest + 1})",
        )


def test_recent_keys_follow_the_window():
    """As many as the window holds, at least 32, unless the preset or the request says."""
    assert parse({"rate": 8, "window": 100}).recent == 100
    assert parse({"rate": 8, "window": 5}).recent == MIN_RECENT == 32
    assert parse({"rate": 8, "window": 100, "recent": 7}).recent == 7
    assert parse({"rate": 8, "policy": "kvc-paper"}).recent == 8
    assert parse({"rate": 8, "policy": "streaming-llm"}).recent == 32
    assert parse({"rate": 8, "policy": "streaming-llm"}).window == 1


def test_a_scorer_and_an_apportioner_by_name():
    spec = parse(OWN | {"window": 16})
    assert spec.policy == "attention-window+uniform"
    assert (spec.scorer, spec.apportioner, spec.sinks) == ("attention-window", "uniform", 4)
    assert spec.parameters["window"] == 16
    default = methods("scorers")["attention-window"].parameters["pool"].default
    assert spec.parameters["pool"] == default
    assert spec.to_json() == {
        "rate": 8.0, "sinks": 4, "recent": 32, "min_tokens": 64, "prefix_tokens": 0,
        "question_tokens": 0, "recompress_every": 0, "prefill_block": 0,
        "hold_s": 0, **spec.parameters,
        "scorer": "attention-window", "apportioner": "uniform",
    }  # fmt: skip
    assert parse(spec.to_json()) == spec


def test_a_preset_as_json():
    spec = parse({"budget": 100, "policy": "snapkv"})
    assert spec.to_json() == {
        "budget": 100, "sinks": 4, "recent": 32, "min_tokens": 64, "prefix_tokens": 0,
        "question_tokens": 0, "recompress_every": 0, "prefill_block": 0,
        "hold_s": 0, **spec.parameters,
        "policy": "snapkv",
    }  # fmt: skip
    assert "rate" not in spec.to_json()


def test_a_question_to_be_counted_survives_json():
    spec = parse({"rate": 8, "question": "last_message", "question_tokens": 0})
    assert (spec.question, spec.question_tokens) == ("last_message", 0)
    assert parse(spec.to_json()) == spec
    assert parse({"rate": 8, "question": None}).question is None
    assert "question" not in parse({"rate": 8}).to_json()


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("name", ["force", "explain"])
def test_switches_survive_json(name, on):
    spec = parse({"rate": 8, name: on})
    assert getattr(spec, name) is on
    assert parse(spec.to_json()) == spec


def test_blocks():
    rate = parse({"rate": 3})
    assert [rate.blocks_for(n, 16) for n in (0, 1, 3, 4, 6, 7)] == [1, 1, 1, 2, 2, 3]
    budget = parse({"budget": 33})
    assert [budget.blocks_for(n, 16) for n in (0, 1, 2, 3, 9)] == [1, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (8, "8"), ("x", "'x'"), (10**20 - 1, "9" * 20), (-(10**20) + 1, "-" + "9" * 20),
        (10**20, "a number of more than 20 digits"), (-(10**20), "a number of more than 20 digits"),
        ("x" * 58, repr("x" * 58)), ("x" * 59, "'" + "x" * 56 + "..."), (1e300, "1e+300"),
    ],
)  # fmt: skip
def test_values_are_shown_short(value, shown):
    assert short(value) == shown


@pytest.mark.parametrize(("value", "low", "high"), [(3, 3, 9), (9, 3, 9), (5.0, 3, 9)])
def test_whole_numbers_with_their_bounds(value, low, high):
    found = integer("n", value, low, high)
    assert found == value
    assert type(found) is int


@pytest.mark.parametrize("value", [2, 10, 5.5, "5", None, True, [5], float("inf"), float("nan")])
def test_what_is_no_whole_number(value):
    with pytest.raises(SpecError) as caught:
        integer("n", value, 3, 9)
    assert caught.value.name == "n"
    assert caught.value.problem == f"must be a whole number from 3 to 9 (got {value!r})"


@pytest.mark.parametrize("value", [0, 1, 0.0, "False", None])
def test_one_and_zero_are_not_true_and_false(value):
    one_of("flag", False, [False, True])
    with pytest.raises(SpecError, match=r"unknown flag .*; known are False, True"):
        one_of("flag", value, [False, True])


def test_a_parameter_of_numbers():
    gamma = Parameter("gamma", 2.0, "", 0.5, 4.0)
    assert [parameter_value(gamma, x) for x in (0.5, 4, 1.25)] == [0.5, 4.0, 1.25]
    assert type(parameter_value(gamma, 4)) is float
    for value in (0.4, 4.1, True, "1", None, float("nan")):
        with pytest.raises(SpecError) as caught:
            parameter_value(gamma, value)
        assert caught.value.name == "gamma"
        assert caught.value.problem == f"must be a number from 0.5 to 4 (got {value!r})"


def test_a_parameter_of_steps():
    pool = Parameter("pool", 7, "", 3, 11, 4)
    assert [parameter_value(pool, x) for x in (3, 7.0, 11)] == [3, 7, 11]
    for value in (4, 5, 6):
        with pytest.raises(SpecError) as caught:
            parameter_value(pool, value)
        assert caught.value.problem == f"must be 3 plus a multiple of 4 (got {value})"
    with pytest.raises(SpecError, match="pool: must be a whole number from 3 to 11"):
        parameter_value(pool, 15)


def test_a_parameter_of_choices():
    pooling = Parameter("pooling", "max", "", choices=("max", "mean"))
    assert parameter_value(pooling, "mean") == "mean"
    with pytest.raises(SpecError, match="pooling: unknown pooling 'sum'; known are max, mean"):
        parameter_value(pooling, "sum")


def test_parameters_of_a_policy():
    both = policy_parameters("attention-window", "global")
    own = [methods("scorers")["attention-window"], methods("apportioners")["global"]]
    assert both == own[0].parameters | own[1].parameters
    both.clear()
    assert policy_parameters("attention-window", "global"), "a copy of its own"
