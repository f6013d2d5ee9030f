"""Pages of other origins, in browsers: only those that the server was told."""

from __future__ import annotations

import httpx
import pytest
from kvc_server.settings import Settings, SettingsError

from tests.server.stub_worker import StubWorker, play

ASK = {"Access-Control-Request-Method": "POST",
       "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
PAGE = "https://app.example"


@pytest.mark.parametrize("told", [(), (PAGE,), ("*",)])
def test_pages_of_the_origins_that_were_told_may_call(told: tuple[str, ...]) -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        for origin in (PAGE, "https://other.example"):
            allowed = "*" in told or origin in told
            asked = await client.options("/generate", headers=ASK | {"Origin": origin})
            assert (asked.status_code == 200) == allowed
            assert ("access-control-allow-origin" in asked.headers) == allowed
            worker.says(b"{}")
            answer = await client.post("/generate", json={}, headers={"Origin": origin})
            assert answer.status_code == 200
            assert ("access-control-allow-origin" in answer.headers) == allowed
            refused = await client.post("/generate", content=b"[", headers={"Origin": origin})
            assert refused.status_code == 400
            assert ("access-control-allow-origin" in refused.headers) == allowed
        assert (await client.options("/generate")).headers["allow"] == "OPTIONS, POST"

    play(scenario, cors_origins=told)


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://a/b", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match="--cors-origin must look like"):
        Settings(worker_url="http://a", cors_origins=(origin,))
