"""What the gateway changes on the way to the worker and back, and what it passes on as it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from kvc_server.proxy import (
    request_headers,
    response_headers,
    while_connected,
)
from starlette.requests import ClientDisconnect

from tests.server.stub_worker import DROP, PATIENCE, StubWorker, head, play

GENERATE = "/generate"


# ---------------------------------------------------------------------------- headers


def test_the_clients_host_does_not_reach_the_worker():
    """The worker, or a router before it, chooses by Host: it must be the worker's own."""

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        await client.post(GENERATE, json={"text": "a"}, headers={"host": "example.org"})
        assert worker.headers("host") == [f"127.0.0.1:{worker.port}"]

    play(scenario)


def test_what_of_a_requests_headers_reaches_the_worker():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        sent = [
            ("Authorization", "Bearer key"),
            ("X-Trace", "1"),
            ("X-Trace", "2"),
            ("Accept-Encoding", "gzip, br"),
            ("Proxy-Authorization", "Basic secret"),
            ("TE", "trailers"),
            ("Keep-Alive", "timeout=5"),
            ("X-KV-Compression-Rate", "8"),
        ]
        answer = await client.post(f"{GENERATE}?x=1&y", json={"text": "prompt"}, headers=sent)
        assert answer.status_code == 200
        assert worker.head[0] == b"POST /generate?x=1&y HTTP/1.1"
        assert worker.headers("authorization") == ["Bearer key"]
        assert worker.headers("x-trace") == ["1", "2"]
        assert worker.headers("accept-encoding") == ["identity"], "answers are read on the way"
        for name in ("proxy-authorization", "te", "keep-alive", "x-kv-compression-rate"):
            assert worker.header(name) is None
        assert worker.headers("content-length") == [str(len(worker.body))]
        assert json.loads(worker.body)["text"] == "prompt"

    play(scenario)


def test_headers_are_dropped_whatever_their_case():
    """HTTP/1.1 headers that hold for one connection, and those that describe the body's bytes."""
    hop_by_hop = (
        b"Connection Keep-Alive Proxy-Authenticate Proxy-Authorization TE Trailer "
        b"Transfer-Encoding Upgrade Content-Length"
    ).split()
    asked = [*hop_by_hop, b"Host", b"Accept-Encoding", b"Expect", b"X-KV-Compression-Rate"]
    for spelled in (bytes, bytes.lower, bytes.upper):
        kept = request_headers([*((spelled(name), b"1") for name in asked), (b"X-Mine", b"2")])
        assert kept == [(b"X-Mine", b"2"), (b"accept-encoding", b"identity")]
        answered = [*hop_by_hop, b"Date", b"Server"]
        raw = [*((spelled(name), b"1") for name in answered), (b"X-Mine", b"2"), (b"Host", b"3")]
        assert response_headers(raw) == [(b"x-mine", b"2"), (b"host", b"3")]


# ---------------------------------------------------------------------------- whole answers


def test_an_answer_comes_back_byte_for_byte():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        body = b'{ "text":"\\u00e9",\n "order" : [2,1] }  '
        chunks = b"5\r\n" + body[:5] + b"\r\n", b"%x\r\n" % len(body[5:]) + body[5:] + b"\r\n"
        lines = ("Content-Type: application/json", "Transfer-Encoding: chunked", "Server: theirs",
                 "Date: yesterday", "Set-Cookie: a=1", "Set-Cookie: b=2")  # fmt: skip
        worker.answer(head(202, *lines), chunks[0], 0.02, chunks[1], b"0\r\n\r\n")
        answer = await client.post(GENERATE, json={"text": "a"})
        assert (answer.status_code, answer.content) == (202, body)
        assert answer.headers["content-length"] == str(len(body))
        assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
        assert "theirs" not in answer.headers.get("server", "")
        assert "yesterday" not in answer.headers["date"]
        assert "transfer-encoding" not in answer.headers
        # every request has its own connection
        await asyncio.wait_for(worker.closed.wait(), PATIENCE)

    play(scenario)


@pytest.mark.parametrize("status", [400, 422, 500, 599])
def test_the_workers_error_keeps_its_status(status):
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b'{"message": "too long", "param": "input"}', status)
        answer = await client.post(GENERATE, json={"text": "a"})
        error = answer.json()["error"]
        assert (answer.status_code, error["message"]) == (status, "too long")
        assert error["param"] == "input"
        await asyncio.wait_for(worker.closed.wait(), PATIENCE)

    play(scenario)


def test_an_errors_headers_tell_the_client_what_to_do():
    lines = ("Retry-After: 7", "WWW-Authenticate: Bearer",
             "X-RateLimit-Remaining: 0", "X-Internal: secret")  # fmt: skip

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        for kind in ("json", "text"):
            worker.says(b'{"message": "busy"}' if kind == "json" else b"busy", 429, *lines)
            answer = await client.post(GENERATE, json={"text": "a"})
            names = ("retry-after", "www-authenticate", "x-ratelimit-remaining")
            assert [answer.headers.get(name) for name in names] == ["7", "Bearer", "0"]
            assert "x-internal" not in answer.headers
            assert answer.json()["error"]["message"] == "busy"
        worker.answer(head(429, "Content-Type: text/event-stream", "Retry-After: 8"), b"busy", DROP)
        answer = await client.post(GENERATE, json={"text": "a"})
        assert answer.headers["retry-after"] == "8"

    play(scenario)


@pytest.mark.parametrize("encoding", ["identity", "Identity", "IDENTITY"])
def test_a_body_may_say_that_it_is_not_encoded(encoding):
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        headers = {"Content-Encoding": encoding}
        assert (await client.post(GENERATE, json={}, headers=headers)).status_code == 200

    play(scenario)


def test_head_and_options():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b'{"data": []}')
        for path in ("/v1/models", "/live", "/readiness", "/health", "/v1/kv_policies", "/metrics"):
            whole, bare = await client.get(path), await client.head(path)
            assert bare.status_code == whole.status_code
            assert bare.content == b""
            assert bare.headers["content-type"] == whole.headers["content-type"]
            options = await client.options(path)
            assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
        for path in ("/v1/chat/completions", "/v1/completions", GENERATE, "/v1/tokenize"):
            options = await client.options(path)
            assert (options.status_code, options.headers["allow"]) == (204, "OPTIONS, POST")
            assert (await client.head(path)).status_code == 405

    play(scenario)


def test_an_answer_below_400_is_no_error():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b'{"message": "elsewhere"}', 399)
        answer = await client.post(GENERATE, json={"text": "a"})
        assert (answer.status_code, answer.json()) == (399, {"message": "elsewhere"})

    play(scenario)


def test_an_answer_without_a_type_is_passed_on():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.answer(head(200, "Content-Length: 2") + b"ok")
        assert (await client.post(GENERATE, json={"text": "a"})).text == "ok"

    play(scenario)


# ---------------------------------------------------------------------------- the client's presence


async def nobody_leaves() -> dict[str, Any]:
    await asyncio.sleep(10 * PATIENCE)
    raise AssertionError


def test_work_ends_with_what_it_raised():
    async def fails() -> None:
        raise KeyError("found")

    with pytest.raises(KeyError, match="found"):
        asyncio.run(asyncio.wait_for(while_connected(nobody_leaves, fails()), PATIENCE))


def test_work_that_is_done_does_not_wait_for_the_client():
    async def scenario() -> list[int]:
        done: list[int] = []

        async def works() -> None:
            await asyncio.sleep(0.01)
            done.append(1)

        await asyncio.wait_for(while_connected(nobody_leaves, works()), PATIENCE)
        assert len(asyncio.all_tasks()) == 1, "nothing goes on listening"
        return done

    assert asyncio.run(scenario()) == [1]


def test_only_a_disconnect_ends_the_work():
    """The request's body comes by the same way, and may come while the worker is at it."""

    async def scenario() -> list[str]:
        messages = iter(["http.request", "http.request", "http.disconnect"])
        seen: list[str] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.01)
            seen.append(next(messages))
            return {"type": seen[-1]}

        async def works() -> None:
            try:
                await asyncio.sleep(10 * PATIENCE)
            finally:
                await asyncio.sleep(0.01)
                seen.append("cleaned up")

        with pytest.raises(ClientDisconnect):
            await asyncio.wait_for(while_connected(receive, works()), PATIENCE)
        return seen

    assert asyncio.run(scenario()) == ["http.request", "http.request", "http.disconnect",
                                       "cleaned up"]  # fmt: skip
