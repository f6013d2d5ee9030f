"""What a server refuses of the knob, and what it makes of a budget."""

from __future__ import annotations

from typing import Any

import pytest
from kvc_server.errors import ApiError
from kvc_server.knob import place
from kvc_server.knob_limits import KnobLimits
from kvc_server.settings import Settings, SettingsError

from sgl_kvc.spec import CUSTOM_PARAM, Extent, parse

P = 16


def placed(knob: Any, max_rate: float = 64, header: tuple[str, ...] = (), **limits: Any) -> dict:
    """The knob that the worker gets; `knob` None is none."""
    settings = Settings("http://a", max_rate=max_rate, knob_limits=KnobLimits(**limits))
    body = {} if knob is None else {CUSTOM_PARAM: knob}
    return place(body, header, native=False, settings=settings)["custom_params"][CUSTOM_PARAM]


def blocks(knob: dict, tokens: int) -> int:
    """Blocks that a prompt is compressed to."""
    return Extent.of(parse(knob), tokens, P).segment_blocks


@pytest.mark.parametrize("tokens", [64, 1000, 1024, 100_000])
def test_a_budget_is_bounded_by_the_highest_rate(tokens: int) -> None:
    whole = tokens // P
    assert blocks(placed({"budget": 1}, max_rate=4), tokens) == -(-whole // 4)
    assert blocks(placed({"budget": 1}, max_rate=1024), tokens) == max(1, -(-whole // 1024))
    assert blocks(placed({"budget": 1, "max_rate": 2}, max_rate=4), tokens) == -(-whole // 2)
    assert blocks(placed({"budget": 512}, max_rate=64), tokens) >= min(whole, 32)


def test_a_request_cannot_raise_the_highest_rate() -> None:
    with pytest.raises(ApiError) as caught:
        placed({"budget": 1, "max_rate": 8}, max_rate=4)
    assert caught.value.param == f"{CUSTOM_PARAM}.max_rate"
    with pytest.raises(ApiError) as caught:
        placed({"rate": 2, "max_rate": 2})
    assert caught.value.param == f"{CUSTOM_PARAM}.max_rate"


@pytest.mark.parametrize(
    ("knob", "limits", "field"),
    [
        ({"rate": 2, "policy": "snapkv"}, {"policies": frozenset({"kv-compress"})}, "policy"),
        ({"rate": 2, "scorer": "knorm", "apportioner": "uniform"},
         {"policies": frozenset({"kv-compress", "knorm"})}, "scorer"),
        ({"rate": 2, "policy": "h2o"}, {"all_queries": False}, "policy"),
        ({"rate": 2, "explain": True}, {"explain": False}, "explain"),
        ({"rate": 2, "window": 65}, {"max_window": 64}, "window"),
        ({"budget": 63}, {"min_budget": 64}, "budget"),
        ({"rate": 2, "recompress_every": 15}, {}, "recompress_every"),
        ({"rate": 2, "recompress_every": 99}, {"min_recompress_every": 100}, "recompress_every"),
        ({"rate": 3.9}, {"min_rate": 4}, "rate"),
        ({"rate": 1}, {"min_rate": 4}, "rate"),
        ({"budget": 1}, {"min_rate": 4}, "budget"),
        ({"rate": 4, "min_tokens": 65}, {"min_rate": 4}, "min_tokens"),
        ({"rate": 4, "prefix_tokens": 1}, {"min_rate": 4}, "prefix_tokens"),
        ({"rate": 4, "question_tokens": 1}, {"min_rate": 4}, "question_tokens"),
        ({"rate": 4, "question": "last_message"}, {"min_rate": 4}, "question"),
    ],
)  # fmt: skip
def test_what_is_not_allowed_names_its_field(knob: dict, limits: dict, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        placed(knob, **limits)
    assert (caught.value.status, caught.value.param) == (400, f"{CUSTOM_PARAM}.{field}")


@pytest.mark.parametrize(
    ("knob", "limits"),
    [
        ({"rate": 2, "policy": "snapkv"}, {"policies": frozenset({"kv-compress", "snapkv"})}),
        ({"rate": 2, "scorer": "knorm", "apportioner": "uniform"},
         {"policies": frozenset({"kv-compress", "knorm+uniform"})}),
        ({"rate": 2, "policy": "h2o"}, {}),
        ({"rate": 2, "explain": True}, {}),
        ({"rate": 2, "window": 64}, {"max_window": 64}),
        ({"budget": 64}, {"min_budget": 64}),
        ({"rate": 2, "recompress_every": 16}, {}),
        ({"rate": 2, "recompress_every": 1}, {"min_recompress_every": 1}),
        ({"rate": 4, "min_tokens": 64}, {"min_rate": 4}),
    ],
)  # fmt: skip
def test_what_is_allowed_arrives(knob: dict, limits: dict) -> None:
    assert parse(placed(knob, **limits)) == parse(knob, max_rate=64)


@pytest.mark.parametrize(
    ("body", "header", "native"),
    [
        ({CUSTOM_PARAM: {"rate": 2}}, (), False),
        ({"custom_params": {CUSTOM_PARAM: {"rate": 2}}}, (), False),
        ({}, ("2",), False),
        ({CUSTOM_PARAM: {"rate": 2}}, (), True),
        ({"sampling_params": {"custom_params": {CUSTOM_PARAM: {"rate": 2}}}}, (), True),
        ({"sampling_params": [{}, {"custom_params": {CUSTOM_PARAM: {"rate": 2}}}]}, (), True),
    ],
)
def test_limits_hold_wherever_the_knob_stands(
    body: dict, header: tuple[str, ...], native: bool
) -> None:
    settings = Settings("http://a", knob_limits=KnobLimits(min_rate=4))
    with pytest.raises(ApiError) as caught:
        place(body, header, native=native, settings=settings)
    assert "at least 4 on this server" in caught.value.message


def test_who_names_no_rate_gets_the_least() -> None:
    assert placed(None, min_rate=4) == {"rate": 4}
    assert placed(None) == {"rate": 1}


@pytest.mark.parametrize(
    "knob",
    [
        None, {"rate": 1}, {"rate": 2}, {"budget": 1}, {"rate": 16, "min_tokens": 9999},
        {"rate": 16, "prefix_tokens": 9999}, {"rate": 16, "question_tokens": 9999},
    ],
)  # fmt: skip
def test_a_forced_rate_is_everybodys(knob: Any) -> None:
    forced = parse(placed(knob, force_rate=8))
    assert (forced.rate, forced.budget, forced.min_tokens) == (8, None, 64)
    assert (forced.prefix_tokens, forced.question_tokens) == (0, 0)
    assert parse(placed({"rate": 2, "question": "last_message"}, force_rate=8)).question is None
    named = placed({"rate": 2, "policy": "snapkv"}, force_rate=8)
    assert (named["rate"], named["policy"]) == (8, "snapkv")


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"policies": frozenset({"snapkv"})}, "--policies must name kv-compress"),
        ({"policies": frozenset({"kv-compress", "magic"})}, "--policies: magic"),
        ({"min_rate": 65}, "--min-rate: must be at most 64"),
        ({"force_rate": 0.5}, "--force-rate: must be at least 1"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        Settings("http://a", max_rate=64, knob_limits=KnobLimits(**limits))
