"""A knob that did not reach the worker, and what the response says of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc_server.events import Rewriter
from kvc_server.knob import place, settle
from kvc_server.reports import DROPPED, NO_REPORT, Reports
from kvc_server.settings import Settings

from sgl_kvc.spec import KNOB_HEADER, parse, routed
from tests.server.stub_worker import StubWorker, metrics, play

CHAT = "/v1/chat/completions"
KNOB = {"rate": 8}
UNTOUCHED = {"policy": None, "rate": 1.0, "skipped": None}
SERVED = {"policy": "kv-compress", "rate": 8.0, "skipped": None}
SKIPPED = {"policy": None, "rate": 1.0, "skipped": "nothing to remove"}


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], **fields}


@pytest.mark.parametrize(
    ("knob", "report", "lost"),
    [
        (KNOB, UNTOUCHED, True),
        (KNOB, SERVED, False),
        (KNOB, SKIPPED, False),
        (KNOB, SERVED | {"rate": 4.0}, True),
        (KNOB, SERVED | {"policy": "snapkv"}, True),
        ({"budget": 100}, SERVED | {"rate": None}, False),
        ({"rate": 1}, UNTOUCHED, False),
        ({"on_pressure": 8}, UNTOUCHED | {"on_pressure": 8.0}, False),
        ({"on_pressure": 8}, SERVED | {"on_pressure": 8.0}, False),
        ({"on_pressure": 8}, UNTOUCHED, True),
    ],
)
def test_a_report_is_held_against_what_was_sent(knob: dict, report: dict, lost: bool) -> None:
    said = json.dumps({"a": "ä", "kv_compression": report}).encode()

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(said)
        answer = await client.post(CHAT, json=body(kv_compression=knob))
        told = answer.json()["kv_compression"]
        assert told == (report | {"skipped": DROPPED} if lost else report)
        if not lost:
            assert answer.content == said, "as it came"
        assert (await metrics(worker, client))[("kvc_knobs_lost_total",)] == lost

    play(scenario)


def test_in_streams() -> None:
    first = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    last = b"data: " + json.dumps({"choices": [], "kv_compression": UNTOUCHED}).encode()

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.streams(first, last[:30], 0.02, last[30:] + b"\n\ndata: [DONE]\n\n")
        answer = await client.post(CHAT, json=body(stream=True, kv_compression=KNOB))
        lines = answer.content.split(b"\n\n")
        assert lines[0] + b"\n\n" == first
        assert json.loads(lines[1][6:])["kv_compression"]["skipped"] == DROPPED
        assert lines[2:] == [b"data: [DONE]", b""]
        off = await client.post(CHAT, json=body(stream=True))
        assert off.content == first + last + b"\n\ndata: [DONE]\n\n"
        assert (await metrics(worker, client))[("kvc_knobs_lost_total",)] == 1

    play(scenario)


def test_a_worker_without_reports_is_told_of() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b'{"choices": []}')
        answer = await client.post(CHAT, json=body(kv_compression=KNOB))
        assert answer.json()["kv_compression"]["skipped"] == NO_REPORT
        assert "kv_compression" not in (await client.post(CHAT, json=body())).json()
        worker.streams(b"data: {}\n\ndata: [DONE]\n\n")
        answer = await client.post(CHAT, json=body(stream=True, kv_compression=KNOB))
        comment = f": kv_compression: {NO_REPORT}\n\n".encode()
        assert answer.content == b"data: {}\n\n" + comment + b"data: [DONE]\n\n"
        assert (await metrics(worker, client))[("kvc_knobs_lost_total",)] == 2

    play(scenario)


@settings(deadline=None)
@given(st.data())
def test_however_a_stream_is_cut(data: st.DataObject) -> None:
    events = [b'data: {"choices": [1]}', b'data: {"error": {"message": "x", "code": 500}}',
              b"data: " + json.dumps({"kv_compression": UNTOUCHED}).encode(), b"data: [DONE]"]
    text = b"\n\n".join(data.draw(st.lists(st.sampled_from(events), max_size=6)))
    whole = Rewriter(Reports((parse(KNOB),)))
    expected = whole.feed(text) + whole.rest()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    rewriter = Rewriter(Reports((parse(KNOB),)))
    assert b"".join(map(rewriter.feed, pieces)) + rewriter.rest() == expected


def test_the_knob_also_travels_where_routers_let_it_pass() -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        forged = {routed(KNOB_HEADER): '{"rate": 2}', "X-Request-Id-Own": "mine"}
        await client.post(CHAT, json=body(kv_compression=KNOB), headers=forged)
        sent = json.loads(worker.body)["custom_params"]["kv_compression"]
        assert sent["rate"] == 8
        assert [json.loads(text) for text in worker.headers(routed(KNOB_HEADER))] == [sent]
        assert worker.headers("x-request-id-own") == ["mine"]

    play(scenario)


def test_a_gateway_behind_a_router_reads_the_header() -> None:
    header = {routed(KNOB_HEADER): '{"rate": 2}'}

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(b"{}")
        for path in (CHAT, "/v1/messages", "/generate"):
            await client.post(path, json=body(), headers=header)
            (text,) = worker.headers(routed(KNOB_HEADER))
            assert json.loads(text)["rate"] == 2
        for text in ('{"rate": 0}', "{"):
            refused = await client.post(CHAT, json=body(), headers={routed(KNOB_HEADER): text})
            assert refused.status_code == 400

    play(scenario)


@pytest.mark.parametrize(
    ("knob", "field"),
    [
        ({"rate": 4, "elastic": {"max_rate": 2}}, "elastic"),
        ({"rate": 4, "elastic": {"max_rate": 65}}, "elastic"),
        ({"rate": 4, "elastic": {"rate": 8}}, "elastic"),
        ({"rate": 4, "elastic": 8}, "elastic"),
        ({"budget": 100, "elastic": {"max_rate": 8}}, "elastic"),
        ({"rate": 65, "elastic": {"max_rate": 65}}, "rate"),
    ],
)
def test_elastic_is_checked(knob: dict, field: str) -> None:
    settings = Settings(worker_url="http://a", max_rate=64)
    with pytest.raises(Exception, match=f"kv_compression.{field}: "):
        place({"kv_compression": knob}, [], native=False, settings=settings)


def test_elastic_is_taken_out() -> None:
    settings = Settings(worker_url="http://a")
    knob = {"rate": 4, "elastic": {"max_rate": 8}}
    placed = place({"kv_compression": knob}, [], native=False, settings=settings)
    sent = placed["custom_params"]["kv_compression"]
    specs, elastic = settle([sent], 6.5)
    assert (specs[0].rate, sent["rate"]) == (4, 6.5)
    assert elastic is not None
    assert elastic.report(None) == {"asked": 4.0, "max_rate": 8.0, "given": 4.0}
    assert parse(sent).rate == 6.5
