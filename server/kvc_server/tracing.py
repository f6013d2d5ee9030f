"""OpenTelemetry traces: a span per request, with what the access log tells, and nothing more.

The libraries are the extra `sgl-kvc[otel]`; where the spans go is told in OpenTelemetry's own
variables, such as `OTEL_EXPORTER_OTLP_ENDPOINT`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvc_server.observing import RECORD
from kvc_server.record import Record
from kvc_server.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_UNTOLD = frozenset({"time", "seconds", "first_seconds"})  # a span has its own times


def provider() -> TracerProvider:
    """What exports spans by OTLP over HTTP. Raises SettingsError without the libraries."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(f"--traces needs pip install 'sgl-kvc[otel]': {error}") from None
    made = TracerProvider(resource=Resource.create({"service.name": "sgl-kvc"}))
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


class TracingMiddleware:
    """Makes a span of each request, a child of the client's if it names one.

    The worker is told of the span in the header `traceparent`.
    """

    def __init__(self, app: ASGIApp, *, provider: TracerProvider):
        self.app = app
        self.tracer = provider.get_tracer("kvc_server")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        record: Record = scope[RECORD]
        propagator = TraceContextTextMapPropagator()
        told = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]
                if name in (b"traceparent", b"tracestate")}  # fmt: skip
        with self.tracer.start_as_current_span(
            f"{record.method} {record.endpoint}",
            context=propagator.extract(told),
            kind=SpanKind.SERVER,
            record_exception=False,  # a message may tell what was sent
        ) as span:
            passed: dict[str, str] = {}
            propagator.inject(passed)
            kept = [pair for pair in scope["headers"] if pair[0].decode() not in passed]
            added = [(name.encode(), value.encode()) for name, value in passed.items()]
            scope["headers"] = [*kept, *added]
            try:
                await self.app(scope, receive, send)
            finally:
                span.set_attributes(_attributes(record))


def _attributes(record: Record) -> dict[str, Any]:
    fields = json.loads(record.to_json())
    return {f"kvc.{name}": value for name, value in fields.items()
            if value is not None and name not in _UNTOLD}  # fmt: skip
