"""What a client may cost before its request begins: size, time, and how many at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from kvc_server.limits import Limits

from tests.server.stub_worker import HANG, PATIENCE, StubWorker, metrics, play, send_raw

GENERATE = "/generate"
POST = b"POST /generate HTTP/1.1\r\nHost: x\r\n"


def limits(**given: float) -> dict[str, Limits]:
    return {"limits": Limits(**{"drain_timeout": 1} | given)}


def body_of(size: int) -> bytes:
    """A request of `size` bytes."""
    return json.dumps({"text": "a" * (size - len('{"text": ""}'))}).encode()


@pytest.mark.parametrize("path", [GENERATE, "/v1/tokenize"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_may_be_too_large(chunked: bool, path: str) -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        async def parts(body: bytes) -> AsyncIterator[bytes]:
            for begin in range(0, len(body), 100):
                yield body[begin : begin + 100]

        worker.says(b"{}")
        for size, status in ((1000, 200), (1001, 413)):
            body = body_of(size)
            answer = await client.post(path, content=parts(body) if chunked else body)
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == "body_too_large"
        assert len(json.loads(worker.body)["text"]) == 1000 - len('{"text": ""}')

    play(scenario, **limits(max_body=1000))


def test_a_large_body_is_refused_before_it_is_sent() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        answer = await send_raw(client, POST + b"Content-Length: 9999999999\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"onnection: close" in answer

    play(scenario)


def test_a_body_has_to_come_in_time() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        begin = time.monotonic()
        answer = await send_raw(client, POST + b"Content-Length: 9\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408")
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "body_timeout"
        assert 0.3 <= time.monotonic() - begin < PATIENCE

    play(scenario, **limits(body_timeout=0.3))


@pytest.mark.parametrize("sent", [b"", b"POST /gen", POST])
@pytest.mark.parametrize("before", [b"", b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_headers_have_to_come_in_time(sent: bytes, before: bytes) -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        answer = await asyncio.wait_for(send_raw(client, before + sent), PATIENCE)
        assert answer.startswith(b"HTTP/1.1 200" if before else b"")
        assert answer.count(b"HTTP/1.1") == bool(before)

    play(scenario, **limits(header_timeout=0.3))


def test_the_time_for_headers_begins_anew_behind_every_answer() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        for _ in range(2):
            await asyncio.sleep(1.1)
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        writer.close()

    play(scenario, **limits(header_timeout=2))


def test_an_answer_may_take_longer_than_the_headers() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.streams(b"data: 1\n\n", 0.6, b"data: 2\n\n")
        for _ in range(2):
            answer = await client.post(GENERATE, json={"text": "a"})
            assert answer.content == b"data: 1\n\ndata: 2\n\n"

    play(scenario, **limits(header_timeout=0.2))


def test_more_than_so_many_at_once_are_told_to_wait() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.answer(HANG)
        asked = [asyncio.create_task(client.post(GENERATE, json={})) for _ in range(2)]
        while (await metrics_of(client)) < 2:
            await asyncio.sleep(0.01)
        refused = await client.post(GENERATE, json={})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await client.get("/live")).status_code == 200
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        worker.says(b"{}")
        while (await metrics_of(client)) > 0:
            await asyncio.sleep(0.01)
        assert (await client.post(GENERATE, json={})).status_code == 200

    play(scenario, **limits(max_in_flight=2))


@pytest.mark.parametrize("rest", [b"{}", b""])
def test_who_is_told_to_wait_while_it_still_sends_hears_it(rest: bytes) -> None:
    """Closed before, the connection could be reset and the answer lost. Nobody waits long."""

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.answer(HANG)
        asked = asyncio.create_task(client.post(GENERATE, json={}))
        while (await metrics_of(client)) < 1:
            await asyncio.sleep(0.01)
        url = client.base_url
        told = await asyncio.to_thread(send_late, (url.host, url.port), rest)
        assert told.startswith(b"HTTP/1.1 429")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    play(scenario, **limits(max_in_flight=1))


def send_late(address: tuple[str, int | None], rest: bytes) -> bytes:
    """Send a body some time after its headers: what was answered before it, and then."""
    with socket.create_connection(address, 0.2) as connection:
        connection.sendall(POST + b"Connection: close\r\nContent-Length: 2\r\n\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.sendall(rest)
        connection.settimeout(PATIENCE)
        return connection.recv(1 << 16)


async def metrics_of(client: httpx.AsyncClient) -> float:
    """Requests in flight."""
    text = (await client.get("/metrics")).text
    name = f'kvc_requests_in_flight{{endpoint="{GENERATE}"}} '
    return sum(float(line.split()[-1]) for line in text.split("\n") if line.startswith(name))


def test_a_large_body_stalls_nobody() -> None:
    """Parsed in this process, in whichever thread, it would hold everybody up for a second."""
    body = b'{"input_ids": [' + b"1," * 2_000_000 + b'1], "kv_compression": {"rate": 8}}'

    begin = time.monotonic()
    content = json.loads(body)
    read = time.monotonic()
    json.dumps(content)
    stall = max(read - begin, time.monotonic() - read)  # neither lets another thread run

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        await client.post(GENERATE, json={"text": "a" * 300_000})  # its process is there
        gaps: list[float] = []

        async def tick() -> None:
            while True:
                begin = time.monotonic()
                await asyncio.sleep(0.005)
                gaps.append(time.monotonic() - begin)

        ticking = asyncio.create_task(tick())
        answer = await client.post(GENERATE, content=body)
        ticking.cancel()
        assert answer.status_code == 200
        placed = json.loads(worker.body)
        assert len(placed["input_ids"]) == 2_000_001
        assert placed["sampling_params"]["custom_params"]["kv_compression"]["rate"] == 8
        assert max(gaps) < 0.5 * stall

    play(scenario)


@pytest.mark.parametrize(
    ("extra", "param"), [("", None), (', "kv_compression": {"rate": 0}', "kv_compression.rate")]
)
def test_a_large_body_is_refused_as_a_small_one_is(extra: str, param: str | None) -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        for size in (10, 400_000):
            body = f'{{"text": "{"a" * size}"{extra}' + ("}" if extra else "")
            answer = await client.post(GENERATE, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param

    play(scenario)


def test_a_client_that_leaves_while_it_sends_is_no_error_of_ours() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        url = client.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(POST + b"Content-Length: 9\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        found: dict = {}
        with contextlib.suppress(asyncio.TimeoutError):
            while ("kvc_requests_total", GENERATE, "499") not in found:
                found = await metrics(worker, client)
        assert ("kvc_requests_total", GENERATE, "500") not in found

    play(scenario)
