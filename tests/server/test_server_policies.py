"""The list of policies: complete, over HTTP and from the command, and true to what is served."""

from __future__ import annotations

import json

import httpx
import pytest
from kvc_server.cli import main
from kvc_server.policies import catalogue

from sgl_kvc.spec import DEFAULT_POLICY, PRESETS, SpecError, methods, parse, policy_parameters
from tests.gateways import Gateway


def test_everything_is_listed() -> None:
    listed = catalogue()
    assert listed["default"] == DEFAULT_POLICY == parse({"rate": 2}).policy
    apart = parse({"rate": 2, "question_tokens": 8}).policy
    assert listed["default_with_question_tokens"] == apart
    assert [policy["name"] for policy in listed["policies"]] == list(PRESETS)
    assert all(policy["differs"] for policy in listed["policies"] if policy["name"] != "random")
    for family in ("scorers", "apportioners"):
        assert [method["name"] for method in listed[family]] == list(methods(family))
        for method in listed[family]:
            assert method["summary"]
            assert method["source"]
            assert all(parameter["about"] for parameter in method["parameters"].values())


def test_a_policy_lists_what_a_request_gets() -> None:
    """Spelling the listed defaults out changes nothing."""
    for policy in catalogue()["policies"]:
        defaults = {name: value["default"] for name, value in policy["parameters"].items()}
        defaults |= {"sinks": policy["sinks"], "recent": policy["recent"]}
        knob = {"rate": 8, "policy": policy["name"]}
        assert parse(knob | defaults) == parse(knob)
        pair = {"scorer": policy["scorer"], "apportioner": policy["apportioner"]}
        own = parse({"rate": 8} | pair | defaults)
        assert own.parameters == parse(knob).parameters
        assert own.all_queries == policy["all_queries"]
        assert own.continual == policy["continual"]
        try:
            able = parse(knob | {"prefill_block": 4096}).prefill_block == 4096
        except SpecError as error:
            able = error.name != "prefill_block"
        assert able == policy["blockwise"]


def _beyond(parameter: dict) -> list:
    if "choices" in parameter:
        return ["no such choice"]
    step = parameter.get("step", 1)
    inside = [parameter["min"] + 1] if step > 1 else []
    return [parameter["min"] - step, parameter["max"] + step, *inside]


def test_listed_bounds_are_those_that_are_checked() -> None:
    for policy in catalogue()["policies"]:
        knob = {"rate": 8, "policy": policy["name"]}
        known = policy_parameters(policy["scorer"], policy["apportioner"])
        for name, parameter in policy["parameters"].items():
            assert parameter.get("step", 1) == known[name].step
            ends = parameter.get("choices") or [parameter["min"], parameter["max"]]
            for value in ends:
                assert parse(knob | {name: value}).parameters[name] == value
            for value in _beyond(parameter):
                with pytest.raises(SpecError, match=name):
                    parse(knob | {name: value})


def test_over_http_and_from_the_command(
    lonely: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a worker, too."""
    answer = httpx.get(f"{lonely.url}/v1/kv_policies")
    assert answer.status_code == 200
    assert answer.json() == catalogue()
    assert httpx.post(f"{lonely.url}/v1/kv_policies").status_code == 405
    assert main(["policies", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == catalogue()


def test_the_table_names_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["policies"]) == 0
    printed = capsys.readouterr().out
    assert "how it differs" in printed
    for name in [*PRESETS, *methods("scorers"), *methods("apportioners"), "pooling", "max, mean"]:
        assert name in printed


def test_arguments_for_a_worker_are_refused() -> None:
    for command in (["policies"], ["profile", "--model", "x"]):
        with pytest.raises(SystemExit) as caught:
            main([*command, "--", "--tp", "2"])
        assert caught.value.code == 2
