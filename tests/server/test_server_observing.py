"""Request ids, the access log, and what metrics tell of streams and keys."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.stub_worker import DROP, HANG, StubWorker, head, metrics, play
from tests.server.tenants import Keys

GENERATE = "/generate"
REPORT = {"policy": "kv-compress", "rate": 8.0, "rate_achieved": 7.5, "prompt_tokens": 1000,
          "completion_tokens": 12, "bytes": {"before": 800, "after": 100, "shared": 0},
          "blocks": {"before": 64, "after": 9, "shared": 0}, "skipped": None}  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


@pytest.mark.parametrize(
    ("given", "taken"),
    [(["abc-1.2:3_Z"], True), ([], False), ([""], False), (["a b"], False), (["é"], False),
     (["a" * 129], False), (["a", "b"], False), (["a\tb"], False)],
)  # fmt: skip
def test_a_request_has_one_id_everywhere(tmp_path: Path, given: list[str], taken: bool) -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        headers = [(b"X-Request-Id", value.encode()) for value in given]
        for body, lines_ in ((b"{}", ()), (b'{"message": "no"}', ("X-Request-Id: theirs",))):
            worker.says(body, 429 if lines_ else 200, *lines_)
            answer = await client.post(GENERATE, json={}, headers=headers)
            (told,) = answer.headers.get_list("x-request-id")
            assert (told == given[0]) if taken else told.startswith("req_")
            assert worker.headers("x-request-id") == [told]
            assert lines(tmp_path / "log")[-1]["request_id"] == told
        assert taken or told != (await client.get("/live")).headers["x-request-id"]

    play(scenario, access_log=str(tmp_path / "log"))


def test_the_access_log_tells_what_happened(tmp_path: Path) -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(json.dumps({"text": "secret", "kv_compression": REPORT}).encode())
        await client.post(f"{GENERATE}?key=secret", json={"text": "secret"})
        whole = lines(tmp_path / "log")[-1]
        assert set(whole) == {
            "time", "request_id", "tenant", "method", "endpoint", "status", "stream", "complete",
            "seconds", "first_seconds", "choices", "rate", "rate_achieved", "policy", "skipped",
            "prompt_tokens", "completion_tokens", "bytes_before", "bytes_after",
        }  # fmt: skip
        told = (whole["method"], whole["endpoint"], whole["status"], whole["stream"])
        assert told == ("POST", GENERATE, 200, False)
        assert (whole["rate"], whole["rate_achieved"], whole["policy"]) == (8, 7.5, "kv-compress")
        assert (whole["prompt_tokens"], whole["completion_tokens"]) == (1000, 12)
        assert (whole["bytes_before"], whole["bytes_after"]) == (800, 100)
        assert (whole["choices"], whole["skipped"], whole["first_seconds"]) == (1, 0, None)

        events = b"".join(
            b"data: " + json.dumps({"index": index, "kv_compression": REPORT}).encode() + b"\n\n"
            for index in range(2)
        )
        worker.streams(b"data: 1\n\n", 0.2, events)
        await client.post(GENERATE, json={"text": "secret"})
        streamed = lines(tmp_path / "log")[-1]
        assert (streamed["stream"], streamed["choices"]) == (True, 2)
        assert streamed["completion_tokens"] == 24
        assert 0 < streamed["first_seconds"] < 0.2 < streamed["seconds"]

        await client.get("/secret")
        assert lines(tmp_path / "log")[-1]["endpoint"] == "other"
        worker.answer(head(200, "Content-Type: text/event-stream"), b"data: 1\n\n", DROP)
        await client.post(GENERATE, json={"text": "secret"})
        worker.answer(HANG)
        with pytest.raises(httpx.ReadTimeout):
            await client.post(GENERATE, json={"text": "secret"}, timeout=0.2)
        while lines(tmp_path / "log")[-1]["status"] != 499:
            await asyncio.sleep(0.01)
        assert "secret" not in (tmp_path / "log").read_text()

    play(scenario, access_log=str(tmp_path / "log"))


@pytest.mark.parametrize(
    "told", [{"bytes": 1, "rate": "secret", "policy": ["secret"]}, ["secret"], "secret", None]
)
def test_what_the_worker_tells_wrongly_is_no_error(tmp_path: Path, told: Any) -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(json.dumps({"kv_compression": told}).encode())
        assert (await client.post(GENERATE, json={})).status_code == 200
        assert lines(tmp_path / "log")[-1]["status"] == 200
        assert "secret" not in (tmp_path / "log").read_text()

    play(scenario, access_log=str(tmp_path / "log"))


def test_metrics_of_streams_rates_and_keys(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys", a={}, op={"operator": True})

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        last = b"data: " + json.dumps({"kv_compression": REPORT}).encode() + b"\n\n"
        worker.streams(b"data: 1\n\n", 0.15, b"data: 2\n\n", 0.15, last)
        await client.post(GENERATE, json={}, headers=keys.headers("a"))
        await client.post(GENERATE, json={})
        client.headers.update(keys.headers("op"))
        told = await metrics(worker, client)
        assert told["kvc_inter_token_seconds_count", GENERATE] == 2
        assert 0.3 <= told["kvc_inter_token_seconds_sum", GENERATE] < 0.6
        assert told["kvc_inter_token_seconds_bucket", GENERATE, "0.1"] == 0
        assert told["kvc_time_to_first_token_seconds_count", GENERATE] == 1
        assert told["kvc_rate_achieved_bucket", "6.0"] == 0
        assert told["kvc_rate_achieved_bucket", "8.0"] == 1
        assert told["kvc_tokens_total", "prompt", "a"] == 1000
        assert told["kvc_tokens_total", "completion", "a"] == 12
        assert told["kvc_tenant_requests_total", "200", "a"] == 1
        assert told["kvc_requests_total", GENERATE, "401"] == 1

    play(scenario, keys=str(keys.path))
