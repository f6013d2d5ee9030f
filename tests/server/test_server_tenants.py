"""Whose request it is, and what their key allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvc_server import tenants
from kvc_server.cli import main
from kvc_server.knob_limits import KnobLimits
from kvc_server.settings import Settings, SettingsError
from kvc_server.tenants import KeyFile, digest, new_key

from sgl_kvc.spec import KNOB_HEADER, NAMESPACE_HEADER
from tests.server.stub_worker import StubWorker, play
from tests.server.tenants import Keys

SERVER = Settings(worker_url="http://a", max_rate=64, default_rate=2)
GENERATE = "/generate"


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "_LOOK_INTERVAL_S", 0.0)


def file_of(tmp_path: Path, **entry: Any) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "a", "sha256": digest("key"), **entry}]}))
    return path


# ---------------------------------------------------------------------------- the file


def test_a_key_is_known_by_its_hash_alone(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", a={}, b={})
    known = KeyFile(keys.path, SERVER)
    assert not any(key in keys.path.read_text() for key in keys.keys.values())
    found = [known.find(keys.keys[name]) for name in ("a", "b")]
    assert [tenant and tenant.name for tenant in found] == ["a", "b"]
    assert len({tenant.namespace for tenant in found if tenant}) == 2
    for key in ("", "kvc-", keys.keys["a"][:-1], keys.keys["a"] + "x", digest(keys.keys["a"]),
                "\ud800", new_key()):  # fmt: skip
        assert known.find(key) is None


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, caplog: Any) -> None:
    keys = Keys(tmp_path / "keys", a={}, b={})
    known = KeyFile(keys.path, SERVER)
    before = known.find(keys.keys["a"])
    keys.write(a={"concurrency": 3})
    after = known.find(keys.keys["a"])
    assert before is not None
    assert after is not None
    assert after.concurrency == 3
    assert before.namespace == after.namespace, "its cache stays"
    assert known.find(keys.keys["b"]) is None
    keys.path.write_text('{"keys": [')
    assert known.find(keys.keys["a"]) == after, "a file that cannot be read changes nothing"
    keys.path.unlink()
    assert known.find(keys.keys["a"]) == after
    assert "the keys stay as they were" in caplog.text
    keys.write(b={})
    assert known.find(keys.keys["a"]) is None
    assert known.find(keys.keys["b"]) is not None


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"sha256": "key"}, r"keys\[0\].sha256 must be 64 hex"),
        ({"name": ""}, r"keys\[0\].name must be"),
        ({"limit": 1}, r"keys\[0\].limit: there is no such field"),
        ({"concurrency": 0}, r"concurrency must be a whole number of at least 1"),
        ({"tokens_per_minute": True}, r"tokens_per_minute must be a whole number"),
        ({"operator": 1}, r"operator must be true or false"),
        ({"priority": "high"}, r"priority must be a whole number"),
        ({"knob": {"rate": 2}}, r"knob.rate: there is no such bound"),
        ({"knob": {"max_rate": 1, "default_rate": 2}}, r"knob: --default-rate"),
        ({"knob": {"policies": ["?"]}}, r"knob: --policies"),
        ({"knob": {"max_window": "a"}}, r"knob: "),
        ({"knob": {"explain": "no"}}, r"knob.explain must be true or false"),
        ({"knob": {"all_queries": 0}}, r"knob.all_queries must be true or false"),
        ({"knob": []}, r"knob must be an object"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, entry: dict, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        KeyFile(file_of(tmp_path, **entry), SERVER)


@pytest.mark.parametrize("text", ["", "[]", '{"keys": {}}', '{"keys": [1]}'])
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(SettingsError, match="--keys: "):
        KeyFile(tmp_path / "keys", SERVER)
    with pytest.raises(SettingsError, match="cannot be read"):
        KeyFile(tmp_path / "none", SERVER)


def test_no_name_and_no_key_is_there_twice(tmp_path: Path) -> None:
    entry = {"name": "a", "sha256": digest("key")}
    for other in ({"name": "b"}, {"sha256": digest("other")}):
        path = tmp_path / "keys"
        path.write_text(json.dumps({"keys": [entry, entry | other]}))
        with pytest.raises(SettingsError, match="twice"):
            KeyFile(path, SERVER)


@given(
    server=st.builds(KnobLimits, max_window=st.integers(1, 99), min_budget=st.integers(1, 99),
                     policies=st.sampled_from([None, frozenset({"kv-compress", "knorm"})]),
                     force_rate=st.sampled_from([None, 4]), all_queries=st.booleans(),
                     explain=st.booleans()),
    bounds=st.fixed_dictionaries({}, optional={
        "max_window": st.integers(1, 99), "min_budget": st.integers(1, 99),
        "min_rate": st.integers(1, 8), "all_queries": st.booleans(), "explain": st.booleans(),
        "policies": st.sampled_from([None, frozenset({"kv-compress", "snapkv"})]),
        "force_rate": st.sampled_from([None, 8])}),
)  # fmt: skip
def test_a_key_has_never_more_than_the_server_gives(server: KnobLimits, bounds: dict) -> None:
    got = server.narrowed(**bounds)
    for each in (server, server.narrowed(**bounds)):
        assert got.max_window <= each.max_window
        assert got.min_budget >= each.min_budget
        assert got.min_rate >= each.min_rate
        assert got.all_queries <= each.all_queries
        assert got.explain <= each.explain
        assert each.policies is None or (got.policies or set()) <= each.policies
    assert got.force_rate == (server.force_rate or bounds.get("force_rate"))
    assert server.narrowed() == server


def test_the_command_makes_a_key_and_its_entry(tmp_path: Path, capsys: Any) -> None:
    made = []
    for _ in range(2):
        assert main(["key", "team"]) == 0
        out = capsys.readouterr().out
        (key,) = (line for line in out.split("\n") if line.startswith("kvc-"))
        entry = json.loads(out[out.index("{") :])
        (tmp_path / "keys").write_text(json.dumps({"keys": [entry]}))
        tenant = KeyFile(tmp_path / "keys", SERVER).find(key)
        assert tenant is not None
        assert tenant.name == "team"
        made.append(key)
    assert made[0] != made[1]


# ---------------------------------------------------------------------------- requests


def test_nobody_gets_in_without_a_key(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", a={}, op={"operator": True})

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b'{"data": []}')
        for path in ("/live", "/readiness", "/health"):
            assert (await client.get(path)).status_code != 401
        key = keys.keys["a"]
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": key},
                        {"Authorization": f"Basic {key}"}, {"X-Api-Key": "x"}):  # fmt: skip
            for method, path in (("POST", GENERATE), ("GET", "/v1/models"), ("GET", "/metrics"),
                                 ("GET", "/openapi.json"), ("POST", "/nowhere")):  # fmt: skip
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert worker.body == b""
        for headers in (keys.headers("a"), {"X-Api-Key": keys.keys["a"]}):
            answer = await client.post(GENERATE, json={}, headers=headers)
            assert answer.status_code == 200
            assert worker.header("authorization") is worker.header("x-api-key") is None
        refused = await client.get("/metrics", headers=keys.headers("a"))
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert (await client.get("/metrics", headers=keys.headers("op"))).status_code == 200

    play(scenario, keys=str(keys.path))


def test_a_keys_bounds_and_defaults_of_the_knob(tmp_path: Path) -> None:
    knob = {"max_rate": 8, "default_rate": 4, "policies": ["kv-compress"], "min_budget": 64,
            "explain": False}  # fmt: skip
    keys = Keys(tmp_path / "keys", a={"knob": knob}, b={})

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")

        async def ask(name: str, path: str = GENERATE, **body: Any) -> dict[str, Any] | str:
            answer = await client.post(path, json=body, headers=keys.headers(name))
            if answer.status_code == 400:
                return answer.json()["error"]["param"]
            if path == "/v1/messages":
                return json.loads(worker.header(KNOB_HEADER) or "")
            return json.loads(worker.body)["sampling_params"]["custom_params"]["kv_compression"]

        for path in (GENERATE, "/v1/messages"):
            assert await ask("a", path) == {"rate": 4}
            assert await ask("b", path) == {"rate": 2}
            assert await ask("a", path, kv_compression={"rate": 9}) == "kv_compression.rate"
        assert await ask("a", kv_compression={"rate": 8, "policy": "snapkv"}) == (
            "kv_compression.policy"
        )
        assert await ask("a", kv_compression={"budget": 63}) == "kv_compression.budget"
        assert isinstance(await ask("b", kv_compression={"rate": 64, "policy": "snapkv"}), dict)
        explained = {"rate": 8, "explain": True}
        assert await ask("a", kv_compression=explained) == "kv_compression.explain"
        arrived = await ask("b", kv_compression=explained)
        assert isinstance(arrived, dict)
        assert arrived["explain"] is True
        assert await ask("b", kv_compression={"rate": 65}) == "kv_compression.rate"

    play(scenario, keys=str(keys.path), max_rate=64, default_rate=2)


def test_what_a_key_decides_no_request_can(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", a={"priority": 3}, b={})

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        seen = []
        for name in ("a", "b"):
            headers = keys.headers(name) | {NAMESPACE_HEADER: "theirs", KNOB_HEADER: "1"}
            body = {"priority": 9, "request_id": "resp_mine"}
            await client.post("/v1/responses", json=body, headers=headers)
            sent = json.loads(worker.body)
            assert sent.get("priority") == (3 if name == "a" else None)
            assert "request_id" not in sent
            assert worker.headers(KNOB_HEADER) == ['{"rate": 1}']
            (namespace,) = worker.headers(NAMESPACE_HEADER)
            await client.post("/v1/score", json={}, headers=headers)
            assert worker.headers(NAMESPACE_HEADER) == [namespace]
            seen.append(namespace)
        assert seen[0] != seen[1]
        assert not {"theirs"} & {*seen}

    play(scenario, keys=str(keys.path))
