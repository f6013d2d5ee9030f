"""A span per request: what it tells, and whose child it is."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from kvc_server import app as app_module
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from tests.server.stub_worker import StubWorker, play

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
REPORT = {"policy": "snapkv", "rate": 8.0, "prompt_tokens": 9, "completion_tokens": 3}


def test_a_request_is_a_span_of_its_clients_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(app_module.tracing, "provider", lambda: provider)

    async def spans(count: int) -> tuple[ReadableSpan, ...]:
        """They end after their clients have the answer."""
        while len(exporter.get_finished_spans()) < count:
            await asyncio.sleep(0.01)
        return exporter.get_finished_spans()

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(json.dumps({"text": "secret", "kv_compression": REPORT}).encode())
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        await client.post("/generate?key=secret", json={"text": "secret"}, headers=headers)
        (span,) = await spans(1)
        assert (span.name, span.kind) == ("POST /generate", SpanKind.SERVER)
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == PARENT
        told = f"00-{TRACE}-{span.context.span_id:016x}-01"
        assert worker.headers("traceparent") == [told], "the worker's spans are its children"
        attributes = dict(span.attributes or {})
        assert attributes["kvc.request_id"] == "mine"
        assert (attributes["kvc.status"], attributes["kvc.rate"]) == (200, 8.0)
        assert attributes["kvc.completion_tokens"] == 3
        assert "secret" not in span.to_json()
        worker.says(b'{"message": "secret"}', 400)
        await client.post("/generate", json={"text": "secret"}, headers={"traceparent": "?"})
        _, span = await spans(2)
        assert span.parent is None
        assert (span.attributes or {})["kvc.status"] == 400
        assert "secret" not in span.to_json()

    play(scenario, traces=True)
