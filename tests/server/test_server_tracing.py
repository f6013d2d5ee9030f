"""A span per request: what it tells, whose child it is, and how it gets to a collector."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from kvc_server import app as app_module
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
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


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A receiver of OTLP over HTTP: its URL, and what it was sent."""
    got: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers["content-encoding"] == "gzip":
                body = gzip.decompress(body)
            got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_spans_have_reached_the_collector_when_the_gateway_has_stopped(
    monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        worker.says(json.dumps({"text": "secret", "kv_compression": REPORT}).encode())
        for number in range(3):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": f"r{number}"}
            await client.post("/generate", json={"text": "secret"}, headers=headers)

    with collector() as (url, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
        play(scenario, traces=True)
    resource = got[0].resource_spans[0].resource
    names = {each.key: each.value.string_value for each in resource.attributes}
    assert names["service.name"] == "sgl-kvc"
    spans = [span for request in got for each in request.resource_spans
             for scope in each.scope_spans for span in scope.spans]  # fmt: skip
    assert [span.name for span in spans] == ["POST /generate"] * 3
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in spans} == {(TRACE, PARENT)}
    attributes = [{each.key: each.value for each in span.attributes} for span in spans]
    ids = [each["kvc.request_id"].string_value for each in attributes]
    assert sorted(ids) == ["r0", "r1", "r2"]
    assert {each["kvc.rate"].double_value for each in attributes} == {8.0}
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano > 0 for span in spans)
    assert not any(b"secret" in request.SerializeToString() for request in got)
