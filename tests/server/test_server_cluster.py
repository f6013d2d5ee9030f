"""Gateway, SGLang's own router, two workers: the knob arrives, and a lost worker loses little."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from kvc_server import launch

WORDS = "the old river waits near the quiet village . " * 40
KNOB = {"rate": 8}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 4},
    "/v1/completions": {"prompt": WORDS, "max_tokens": 4},
    "/generate": {"text": WORDS, "sampling_params": {"max_new_tokens": 4}},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[launch.Server]:
    python = ("-m", "kvc_server.cli", "cluster", "--log-level", "warning")
    pool = ("--", "--max-total-tokens", "16384")
    program = launch.Program(python, pool, ready="/readiness", stop_s=30)
    with launch.launched(program, within_s=600) as running:
        yield running


def report(answer: httpx.Response) -> dict[str, Any]:
    """Of a whole answer, or of a stream's last event."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["kv_compression"]
    lines = [line[6:] for line in answer.text.splitlines() if '"kv_compression"' in line]
    return json.loads(lines[-1])["kv_compression"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_knob_arrives(cluster: launch.Server, path: str, stream: bool) -> None:
    body = ENDPOINTS[path] | {"model": "recall", "stream": stream, "kv_compression": KNOB}
    with cluster.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    told = report(answer)
    assert (told["rate"], told["policy"], told["skipped"]) == (8.0, "kv-compress", None)
    assert told["blocks"]["after"] < told["blocks"]["before"] / 4


def test_a_question_is_counted_behind_the_router(cluster: launch.Server) -> None:
    body = ENDPOINTS["/v1/chat/completions"] | {"model": "recall"}
    chat = [*body["messages"], {"role": "user", "content": "what waits ?"}]
    knob = KNOB | {"question": "last_message"}
    with cluster.client() as client:
        answer = client.post(
            "/v1/chat/completions", json=body | {"messages": chat, "kv_compression": knob}
        )
    assert answer.status_code == 200, answer.text
    assert report(answer)["policy"] == "virtual-repeat"


def test_a_worker_that_is_killed_loses_nothing_that_had_not_begun(cluster: launch.Server) -> None:
    """The router asks the other one; the last test here, for one worker is gone afterwards."""
    body = ENDPOINTS["/v1/completions"] | {"model": "recall", "kv_compression": KNOB}
    workers = [
        child
        for child in psutil.Process(cluster.process.pid).children(recursive=True)
        if "sglang.launch_server" in child.cmdline()
    ]
    assert len(workers) == 2

    async def ask_all() -> list[int]:
        async with cluster.async_client() as client:
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(200)
            ]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            launch.kill_group(workers[0].pid)
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    statuses = asyncio.run(ask_all())
    assert statuses == [200] * 200
