"""What the gateway changes on the way to the worker and back, and what it passes on as it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import httpx
import pytest
from kvc_server.proxy import (
    request_headers,
    response_headers,
)

from tests.server.stub_worker import (
    CHAT,
    DROP,
    GENERATE,
    HANG,
    StubWorker,
    head,
    metrics,
    play,
)

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
        await asyncio.wait_for(worker.closed.wait(), 5)  # every request has its own connection

    play(scenario)


@pytest.mark.parametrize("status", [400, 422, 500, 599])
def test_the_workers_error_keeps_its_status(status):
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b'{"message": "too long", "param": "input"}', status)
        answer = await client.post(GENERATE, json={"text": "a"})
        error = answer.json()["error"]
        assert (answer.status_code, error["message"]) == (status, "too long")
        assert error["param"] == "input"
        await asyncio.wait_for(worker.closed.wait(), 5)

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


# ---------------------------------------------------------------------------- streams


def test_a_stream_is_passed_on_as_it_comes():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        parts = [b'data: {"a"', b": 1}\n\n", b"data: 2\n\ndata", b": 3\n\n", b"data: [DONE]\n\n"]
        worker.streams(parts[0], 0.05, parts[1], 0.05, parts[2], 0.05, parts[3], 0.5, parts[4])
        arrived, begin = [], time.monotonic()
        async with client.stream("POST", CHAT, json={"messages": []}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert "content-length" not in answer.headers
            async for chunk in answer.aiter_raw():
                arrived.append((time.monotonic() - begin, chunk))
        assert b"".join(chunk for _, chunk in arrived) == b"".join(parts)
        assert arrived[-1][0] - arrived[0][0] > 0.3, "the first events did not wait for the last"

    play(scenario)


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b'data: {"error": {"message": "no", "code": 400}}\n\n', 400),
        (b'data:{"error": {"message": "no", "code": 429}}\n\n', 429),
        (b'{"error": {"message": "no", "code": 599}}\n\n', 599),
        (b'data: {"error": {"message": "no", "code": 399}}\n\n', 500),
        (b'data: {"error": {"message": "no", "code": 600}}\n\n', 500),
        (b'data: {"error": {"message": "no", "code": "400"}}\n\n', 500),
        (b'data: {"error": {"message": "no"}}\n\ndata: 2\n\n', 500),
        (b'data: {"error": "no"}\n\n', 500),
    ],
)
def test_a_stream_that_begins_with_an_error_is_that_error(first, status):
    """SGLang may answer 200 and then only say why not; a client should see the status."""

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.streams(first[:9], 0.02, first[9:])
        answer = await client.post(CHAT, json={"messages": []})
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == "no"
        assert answer.headers["content-type"] == "application/json"

    play(scenario)


@pytest.mark.parametrize(
    "first",
    [
        b'data: {"error" is no JSON}\n\n',
        b'data: {"error":' + b"[" * 100_000 + b"\n\n",
        b'data: {"text": "{\\"error\\": {\\"code\\": 400}}"}\n\n',
        b'data: 1\n\ndata: {"error": {"message": "late", "code": 400}}\n\n',
        b'data: {"error" without a line\'s end',
        b"",
    ],
)
def test_what_only_looks_like_an_error_is_passed_on(first):
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.streams(first)
        answer = await client.post(CHAT, json={"messages": []})
        assert (answer.status_code, answer.content) == (200, first)

    play(scenario)


def test_an_error_may_come_as_a_stream():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        for status in (400, 503):
            worker.streams(b'{"message":\n', 0.02, b'"busy', 0.02, b' today"}', status=status)
            answer = await client.post(CHAT, json={"messages": []})
            assert (answer.status_code, answer.json()["error"]["message"]) == (status, "busy today")
        worker.streams(b"data: 1\n\n", status=399)
        assert (await client.post(CHAT, json={"messages": []})).status_code == 399

    play(scenario)


@pytest.mark.parametrize(("last", "gap"), [(b"data: 2\n\n", b""), (b"data: half", b"\n\n")])
def test_a_stream_that_breaks_ends_in_an_error_event(last, gap):
    """The client cannot know otherwise: the status was sent long before."""

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        chunked = head(200, "Content-Type: text/event-stream", "Transfer-Encoding: chunked")
        parts = [b"data: 1\n\n", last]
        sent = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
        worker.answer(chunked, sent[0], 0.02, sent[1], 0.02, DROP)
        answer = await client.post(CHAT, json={"messages": []})
        kept = b"".join(parts) + gap + b"data: "
        assert answer.content.startswith(kept)
        assert answer.content.endswith(b"\n\n")
        error = json.loads(answer.content.removeprefix(kept))["error"]
        assert error["code"] == "worker_lost"
        found = await metrics(worker, client)
        assert found["kvc_broken_streams_total", CHAT] == 1

    play(scenario)


def test_a_whole_stream_is_not_counted_as_broken():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.streams(b"data: 1\n\n")
        await client.post(CHAT, json={"messages": []})
        assert not any("broken" in name[0] and name[1:] for name in await metrics(worker, client))

    play(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_the_workers_request_along(stream):
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        if stream:
            worker.streams(b"data: 1\n\n", HANG)
            worker.parts.remove(DROP)
        else:
            worker.answer(HANG)
        with contextlib.suppress(httpx.TimeoutException):
            await client.post(CHAT, json={"messages": []}, timeout=0.3)
        await asyncio.wait_for(worker.closed.wait(), 5)

    play(scenario)


# ---------------------------------------------------------------------------- what is counted
