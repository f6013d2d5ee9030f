"""Event streams on their way through the gateway: at once, whole, and with errors that are said."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import httpx
import pytest

from tests.server.stub_worker import DROP, HANG, PATIENCE, StubWorker, head, metrics, play

CHAT = "/v1/chat/completions"


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


LOST = b'data: {"error": {"message": "Stream error: unexpected EOF", "code": 500}}\n\n'


def test_a_stream_that_the_router_lost_before_it_began_is_asked_for_once_more():
    """SGLang's router has another worker for it, and the client has been sent nothing."""

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.streams(b"data: 2\n\n")
        worker.later, whole = [worker.parts], worker.parts
        worker.streams(LOST)
        answer = await client.post(CHAT, json={"messages": [1]})
        assert (answer.status_code, answer.content) == (200, b"data: 2\n\n")
        assert worker.answered == 2
        assert json.loads(worker.body)["messages"] == [1]
        worker.streams(LOST)
        worker.later = [worker.parts, whole]
        answer = await client.post(CHAT, json={"messages": []})
        assert answer.status_code == 500, "not a third time"
        assert worker.answered == 4

    play(scenario)


def test_a_stream_that_has_begun_is_not_asked_for_again():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.streams(b"data: 1\n\n", LOST)
        answer = await client.post(CHAT, json={"messages": []})
        assert answer.status_code == 200
        assert answer.content.startswith(b"data: 1\n\n")
        assert b"Stream error" in answer.content
        assert worker.answered == 1

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
        b'data: 1\n\ndata: {"error": no JSON}\n\n',
        b'data: 1\n\ndata: {"error',
        b'data: 1\n\nx data: {"error": "not a line of its own"}\n\n',
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


@pytest.mark.parametrize("size", [1, 5, 17, 1000])
def test_an_error_in_mid_stream_has_our_shape(size):
    """SGLang's has its own; what stands around it passes as it came."""
    before, after = b'data: {"a": "data: {\\"error"}\n\ndata: ', b"\n\ndata: [DONE]\n\n"
    late = b'data: {"error": {"object": "error", "message": "late", "type": "x", "code": 400}}'

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        text = before + b"1\n\n" + late + after
        parts = [text[begin : begin + size] for begin in range(0, len(text), size)]
        worker.streams(*(each for part in parts for each in (part, 0.001)))
        answer = await client.post(CHAT, json={"messages": []})
        found = answer.content
        assert found.startswith(before + b"1\n\n")
        assert found.endswith(after)
        event = found.removeprefix(before + b"1\n\n").removesuffix(after)
        assert json.loads(event.removeprefix(b"data: "))["error"] == {
            "message": "late", "type": "invalid_request_error", "param": None, "code": None,
        }  # fmt: skip

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
        before = await metrics(worker, client)
        assert before["kvc_broken_streams_total", CHAT] == 0, "Prometheus needs a sample before"
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


def test_a_stream_that_falls_silent_is_told_from_one_that_breaks():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.answer(head(200, "Content-Type: text/event-stream"), b"data: 1\n\n", HANG)
        answer = await client.post(CHAT, json={"messages": []})
        error = json.loads(answer.content.removeprefix(b"data: 1\n\ndata: "))["error"]
        assert error["code"] == "worker_timeout"

    play(scenario, read_timeout=0.1)


def test_a_whole_stream_is_not_counted_as_broken():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.streams(b"data: 1\n\n")
        await client.post(CHAT, json={"messages": []})
        found = await metrics(worker, client)
        assert found["kvc_broken_streams_total", CHAT] == 0

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
        await asyncio.wait_for(worker.closed.wait(), PATIENCE)

    play(scenario)
