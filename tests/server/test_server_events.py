"""What of the answers is counted: the reports of compression in bodies and streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
from kvc_server.proxy import ResultScanner, results

from tests.server.stub_worker import StubWorker, metrics, play

GENERATE = "/generate"


def result(before: int, after: int) -> dict[str, Any]:
    """A `kv_compression` object of a response, as far as metrics read it."""
    return {"blocks": {"before": before, "after": after}}


def test_the_results_of_answers_are_counted():
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(json.dumps({"text": "", "kv_compression": result(10, 2)}).encode())
        await client.post(GENERATE, json={"text": "a"})
        events = [
            {"index": 0, "kv_compression": result(100, 90)},  # not the last word
            {"index": 0, "kv_compression": result(200, 30)},
            {"index": 1, "kv_compression": result(1000, 400)},
        ]
        worker.streams(*(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events))
        await client.post(GENERATE, json={"text": "a", "stream": True})
        choices = {"choices": [], "kv_compression": [result(10_000, 1000), None, result(1, 1)]}
        worker.says(json.dumps(choices).encode())
        await client.post(GENERATE, json={"text": "a"})
        worker.streams(b"data: " + json.dumps(choices).encode() + b"\n\n")
        await client.post(GENERATE, json={"text": "a"})
        found = await metrics(worker, client)
        assert found["kvc_kv_blocks_total", "before"] == 1210 + 2 * 10_001
        assert found["kvc_kv_blocks_total", "after"] == 432 + 2 * 1001

    play(scenario)


def test_results_of_one_body_or_of_a_batch():
    one, two = {"kv_compression": {"rate": 8}}, {"kv_compression": None}
    assert results(json.dumps(one).encode()) == [{"rate": 8}]
    assert results(json.dumps([one, {"other": 1}, 3, two]).encode()) == [{"rate": 8}, None]
    for body in (b"", b"{}", b"[]", b'{"text": "kv_compression"}', b'"\\"kv_compression\\""'):
        assert results(body) == []
    for body in (b'{"kv_compression": ', b'{"kv_compression":' + b"[" * 100_000):
        assert results(body) == []  # no JSON, or too deep to read


def test_a_scanner_finds_results_however_the_stream_is_cut():
    event = {"index": 0, "kv_compression": {"rate": 8}}
    first, last, other = (
        json.dumps({"index": index, "kv_compression": {"rate": rate}}).encode()
        for index, rate in ((0, 2), (0, 8), (1, 4))
    )
    text = (
        b'data: {"index": 0}\n\n: a comment of "kv_compression"\n\ndata: ' + first
        + b'\n\ndata: {"index": 7, "text": "x"}\n\ndata:' + other + b"\n\ndata: " + last
        + b"\n\ndata: [DONE]\n\n"
    )  # fmt: skip
    for size in (1, 2, 3, 7, 20, 60, len(text)):
        scanner = ResultScanner()
        assert scanner.results() == []
        for begin in range(0, len(text), size):
            scanner.feed(text[begin : begin + size])
        assert scanner.results() == [event["kv_compression"], {"rate": 4}]
    unfinished = ResultScanner()
    unfinished.feed(b"data: " + last)
    assert unfinished.results() == [], "a line counts when it is complete"
    unfinished.feed(b"\n")
    assert unfinished.results() == [{"rate": 8}]
