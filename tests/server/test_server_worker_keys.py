"""The worker's port is open to every local user: it serves nobody but its gateway."""

from __future__ import annotations

import httpx
import pytest
from kvc_server.settings import Settings, SettingsError

from sgl_kvc.spec import WORKER_KEYS
from tests.gateways import Gateway
from tests.server.stub_worker import StubWorker, play


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/generate"),
        ("POST", "/flush_cache"),
        ("POST", "/update_weights_from_disk"),
        ("POST", "/abort_request"),
        ("PUT", "/hicache/storage-backend"),
        ("GET", "/server_info"),
        ("GET", "/v1/models"),
    ],
)
def test_who_has_no_key_is_refused(gateway: Gateway, method: str, path: str) -> None:
    url, mine = gateway.worker_url() + path, {"Authorization": "Bearer guessed"}
    for headers in ({}, mine):
        answer = httpx.request(method, url, json={"text": "a"}, headers=headers, timeout=120)
        assert answer.status_code == 401, answer.text
    served = httpx.get(f"{gateway.url}/v1/models", headers=mine, timeout=120)
    assert served.status_code == 200, "the client's own Authorization is not for the worker"


def test_the_keys_are_nowhere_to_be_read(gateway: Gateway) -> None:
    """Any local user reads argv, and many the log; only the same user reads the environment."""
    worker = gateway.worker()
    keys = [worker.environ()[name] for name in WORKER_KEYS.values()]
    assert len({*keys}) == 2
    assert min(map(len, keys)) > 40
    log = gateway.log.read_text()
    assert "server_args=" in log, "SGLang tells its arguments, keys among them"
    for key in keys:
        assert key not in log
        for process in (worker, *worker.children(recursive=True)):
            assert key not in " ".join(process.cmdline())


@pytest.mark.parametrize("option", ["--api-key", "--admin-api-key=secret"])
def test_a_key_on_the_command_line_is_refused(option: str) -> None:
    with pytest.raises(SettingsError, match="is the gateway's to choose"):
        Settings(model_path="model", worker_args=(option, "secret"))


def test_a_worker_of_somebody_elses_gets_the_key_it_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        headers = {"Authorization": "Bearer mine", "X-Api-Key": "mine"}
        await client.post("/generate", json={}, headers=headers)
        assert worker.headers("authorization") == ["Bearer theirs"]
        assert worker.header("x-api-key") is None

    monkeypatch.setenv(WORKER_KEYS["api_key"], "theirs")
    play(scenario)


def test_an_empty_key_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files and shells pass on a variable that nobody set as an empty one."""

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        await client.post("/generate", json={}, headers={"Authorization": "Bearer mine"})
        assert worker.headers("authorization") == ["Bearer mine"]

    for name in WORKER_KEYS.values():
        monkeypatch.setenv(name, "")
    play(scenario)
