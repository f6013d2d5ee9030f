"""Which address of the worker a request reaches: the route's own, whatever the client writes."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.server.stub_worker import StubWorker, play, send_raw

PATHS = ("/v1/chat/completions", "/v1/completions", "/generate")


def post(target: str, *lines: str, body: bytes = b'{"text": "a"}') -> bytes:
    """One request as bytes, after which the connection ends."""
    first = (f"POST {target} HTTP/1.1", *lines, f"Content-Length: {len(body)}")
    return "\r\n".join([*first, "Connection: close", "", ""]).encode() + body


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "host", ["x/update_weights_from_disk?a=", "x/flush_cache#", "a/../flush_cache", "", "\\@x:1"]
)
def test_no_host_header_leads_to_another_path(path, host):
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        answer = await send_raw(client, post(path, f"Host: {host}"))
        assert answer.startswith(b"HTTP/1.1 200")
        assert worker.head[0] == f"POST {path} HTTP/1.1".encode()
        assert worker.headers("host") == [f"127.0.0.1:{worker.port}"]

    play(scenario)


@pytest.mark.parametrize("query", ["a=%7E&b='\"", "a#b?c", "%2e%2e/&&=", "x=%zz%", "a|b{}^`"])
def test_a_query_arrives_as_it_was_written(query):
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        await send_raw(client, post(f"/generate?{query}", "Host: x"))
        assert worker.head[0] == f"POST /generate?{query} HTTP/1.1".encode()

    play(scenario)


@pytest.mark.parametrize(
    "target", ["/generate/", "/v1//completions", "/generate/../flush_cache", "/flush_cache", "//x"]
)
def test_other_paths_lead_nowhere(target):
    """Nor is anybody sent on to the address of a Host header that he chose."""

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        answer = await send_raw(client, post(target, "Host: example.org"))
        assert answer.startswith(b"HTTP/1.1 404")
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "unknown_url"
        assert not worker.head
        assert b"example.org" not in answer

    play(scenario)


@pytest.mark.parametrize("length", [16_385, 40_000])
def test_a_query_may_be_too_long(length):
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        long = "a" * (length - 1)
        answer = await send_raw(client, post(f"/generate?{long[:16_384]}", "Host: x"))
        assert answer.startswith(b"HTTP/1.1 200")
        worker.head.clear()
        answer = await send_raw(client, post(f"/generate?{long}b", "Host: x"))
        assert answer.startswith(b"HTTP/1.1 414")
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "query_too_long"
        assert not worker.head

    play(scenario)
