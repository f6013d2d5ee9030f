"""Where the knob may stand, where it goes, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc_server.errors import ApiError
from kvc_server.knob import HEADER, place
from kvc_server.knob_limits import KnobLimits
from kvc_server.settings import Settings

from sgl_kvc.spec import CUSTOM_PARAM, FIELDS, PRESETS, CompressionSpec, SpecError, parse

ANY = KnobLimits(min_recompress_every=1)
SETTINGS = Settings(worker_url="http://127.0.0.1:1", max_rate=64, knob_limits=ANY)
HALF = Settings(worker_url="http://127.0.0.1:1", default_rate=2, max_rate=64)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**300, max_value=10**400)
    | st.floats()
    | st.text()
    | st.sampled_from(sorted(PRESETS))
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)
knobs = (
    values
    | st.dictionaries(st.sampled_from([*FIELDS, "mode"]), values, max_size=5)
    | st.fixed_dictionaries({"rate": scalars})
    | st.fixed_dictionaries({"rate": st.just(8), "window": scalars, "pool": scalars})
)
rates = st.floats(min_value=1, max_value=64)


def openai(body: dict[str, Any], *header: str, server: Settings = SETTINGS) -> dict[str, Any]:
    return place(body, header, native=False, settings=server)


def native(body: dict[str, Any], *header: str, server: Settings = SETTINGS) -> dict[str, Any]:
    return place(body, header, native=True, settings=server)


def refused(body: dict[str, Any], *header: str, of_native: bool = False) -> ApiError:
    with pytest.raises(ApiError) as caught:
        place(body, header, native=of_native, settings=SETTINGS)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param in caught.value.message
    assert json.loads(caught.value.to_json())["error"]["param"] == caught.value.param
    return caught.value


def outcome(knob: Any) -> CompressionSpec | SpecError:
    try:
        return parse(knob, max_rate=64)
    except SpecError as error:
        return error


@settings(max_examples=500)
@given(knobs)
def test_every_json_value_parses_or_names_a_field(knob: Any) -> None:
    result = outcome(knob)
    if isinstance(result, SpecError):
        assert result.field.split(".")[0] == CUSTOM_PARAM
        assert str(result).startswith(f"{result.field}: ")
        assert refused({CUSTOM_PARAM: knob}).param == result.field
    else:
        assert parse(result.to_json()) == result
        placed = openai({CUSTOM_PARAM: knob})["custom_params"][CUSTOM_PARAM]
        assert placed == ({"rate": 1} if result.off else result.to_json())


@given(st.dictionaries(st.text().filter(lambda key: key not in (CUSTOM_PARAM, "custom_params")),
                       values), rates)  # fmt: skip
def test_other_fields_pass_untouched(body: dict[str, Any], rate: float) -> None:
    knob = {CUSTOM_PARAM: {"rate": rate}}
    placed = openai(body | knob | {"custom_params": {"mine": 1}})
    custom = placed.pop("custom_params")
    assert json.dumps(placed) == json.dumps(body)
    assert custom["mine"] == 1
    assert custom[CUSTOM_PARAM]["rate"] == rate


def test_the_request_is_not_mutated() -> None:
    body = {CUSTOM_PARAM: {"rate": 8}, "sampling_params": {"custom_params": {"mine": 1}}}
    before = json.dumps(body)
    native(body)
    assert json.dumps(body) == before


@pytest.mark.parametrize(
    ("body", "header"),
    [
        ({CUSTOM_PARAM: {"rate": 8}}, ()),
        ({}, ("8",)),
        ({"custom_params": {CUSTOM_PARAM: {"rate": 8}}}, ()),
        ({"custom_params": None, CUSTOM_PARAM: {"rate": 8.0}}, ()),
    ],
)
def test_each_place_works(body: dict[str, Any], header: tuple[str, ...]) -> None:
    placed = openai(body, *header)
    assert placed["custom_params"][CUSTOM_PARAM]["rate"] == 8
    assert CUSTOM_PARAM not in placed


def test_default_rate_applies_when_nothing_is_said() -> None:
    assert openai({})["custom_params"][CUSTOM_PARAM] == {"rate": 1}
    assert openai({}, server=HALF)["custom_params"][CUSTOM_PARAM] == {"rate": 2}
    for off in (None, {"rate": 1}):
        placed = openai({CUSTOM_PARAM: off}, server=HALF)
        assert placed["custom_params"][CUSTOM_PARAM] == {"rate": 1}
    assert openai({}, "1", server=HALF)["custom_params"][CUSTOM_PARAM] == {"rate": 1}


def test_generate_keeps_its_sampling_params() -> None:
    for sampling in ({}, {"sampling_params": None}, {"sampling_params": {}}):
        placed = native({CUSTOM_PARAM: {"rate": 8}} | sampling)
        assert placed["sampling_params"]["custom_params"][CUSTOM_PARAM]["rate"] == 8
    batch = [{"max_new_tokens": 1}, {"max_new_tokens": 2, "custom_params": {"mine": 1}}]
    placed = native({"sampling_params": batch, CUSTOM_PARAM: {"rate": 8}})["sampling_params"]
    assert [item["max_new_tokens"] for item in placed] == [1, 2]
    assert [item["custom_params"][CUSTOM_PARAM]["rate"] for item in placed] == [8, 8]
    assert placed[1]["custom_params"]["mine"] == 1


def test_each_prompt_of_a_batch_may_have_its_own() -> None:
    batch = [{"custom_params": {CUSTOM_PARAM: {"rate": 4}}}, {}]
    placed = native({"sampling_params": batch}, server=HALF)["sampling_params"]
    assert [item["custom_params"][CUSTOM_PARAM]["rate"] for item in placed] == [4, 2]


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "0.5", "-1", "1e9", "1_0", "8,8", "0x8"])
def test_bad_header(text: str) -> None:
    assert refused({}, text).param == HEADER


def test_said_twice() -> None:
    assert refused({CUSTOM_PARAM: None}, "8").param == HEADER
    assert refused({}, "8", "8").param == HEADER
    inner = {"custom_params": {CUSTOM_PARAM: {"rate": 8}}}
    assert refused(inner | {CUSTOM_PARAM: {"rate": 8}}).param == f"custom_params.{CUSTOM_PARAM}"
    assert refused(inner, "8").param == f"custom_params.{CUSTOM_PARAM}"


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ([], None),
        (8, "sampling_params"),
        ([8], "sampling_params.0"),
        ({"custom_params": [8]}, "sampling_params.custom_params"),
        ({"custom_params": {CUSTOM_PARAM: {"rate": 0}}},
         f"sampling_params.custom_params.{CUSTOM_PARAM}.rate"),
    ],
)  # fmt: skip
def test_odd_sampling_params(sampling: Any, param: str | None) -> None:
    body = {"sampling_params": sampling}
    if param is None:
        assert native(body) == body
    else:
        assert refused(body, of_native=True).param == param


def test_ceiling() -> None:
    assert refused({CUSTOM_PARAM: {"rate": 65}}).param == f"{CUSTOM_PARAM}.rate"
    assert refused({}, "65").param == HEADER
