"""The gateway's own Prometheus metrics, and the middleware that feeds them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_MAX_REASONS = 32
CLIENT_GONE = "499"


class Metrics:
    """Counters of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvc_requests", "Requests answered, by endpoint and status.",
            ["endpoint", "status"], registry=registry,
        )  # fmt: skip
        self.latency = Histogram(
            "kvc_request_seconds", "From a request's arrival to the last byte of its answer.",
            ["endpoint"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "kvc_time_to_first_token_seconds",
            "From a streaming request's arrival to the first byte of its answer.",
            ["endpoint"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge(
            "kvc_requests_in_flight", "Requests being served.", ["endpoint"], registry=registry
        )
        self.broken_streams = Counter(
            "kvc_broken_streams", "Streams that ended in an error event.",
            ["endpoint"], registry=registry,
        )  # fmt: skip
        self.kv_bytes = Counter(
            "kvc_kv_bytes", "KV bytes of served requests, before and after compression.",
            ["when"], registry=registry,
        )  # fmt: skip
        self.blocks = Counter(
            "kvc_kv_blocks", "KV blocks of served requests, before and after compression.",
            ["when"], registry=registry,
        )  # fmt: skip
        self.skipped = Counter(
            "kvc_skipped", "Requests that asked for compression and were served without.",
            ["reason"], registry=registry,
        )  # fmt: skip
        self.worker_restarts = Counter(
            "kvc_worker_restarts", "Times the worker was started again.", registry=registry
        )
        self.worker_up = Gauge(
            "kvc_worker_up", "1 when the worker answers its health check.", registry=registry
        )
        self.probe_age = Gauge(
            "kvc_worker_probe_age_seconds", "Since the worker last answered a probe.",
            registry=registry,
        )  # fmt: skip
        self._reasons: set[str] = set()

    def observe_result(self, result: Any) -> None:
        """Count one `kv_compression` object of a response; others' JSON is not trusted."""
        if not isinstance(result, dict):
            return
        for counter, field in ((self.kv_bytes, "bytes"), (self.blocks, "blocks")):
            sizes = result.get(field)
            for when in ("before", "after"):
                size = sizes.get(when) if isinstance(sizes, dict) else None
                if isinstance(size, (int, float)) and size >= 0:
                    counter.labels(when).inc(size)
        if isinstance(result.get("skipped"), str):
            self.skipped.labels(self._reason(result["skipped"])).inc()

    def _reason(self, text: str) -> str:
        """`text` as a label: without its numbers, and few distinct values in all."""
        text = re.sub(r"\d+", "N", text)
        if text not in self._reasons and len(self._reasons) >= _MAX_REASONS:
            return "other"
        self._reasons.add(text)
        return text

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class MetricsMiddleware:
    """Counts requests, their time, and when a stream's first bytes left."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, endpoints: Iterable[str]):
        self.app = app
        self.metrics = metrics
        self.endpoints = frozenset(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        metrics = self.metrics
        endpoint = scope["path"] if scope["path"] in self.endpoints else "other"
        begin = time.perf_counter()
        status = CLIENT_GONE
        waiting_for_token = False

        async def watched(message: Message) -> None:
            nonlocal status, waiting_for_token
            if message["type"] == "http.response.start":
                status = str(message["status"])
                waiting_for_token = any(
                    name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in message["headers"]
                )
            elif waiting_for_token and message.get("body"):
                waiting_for_token = False
                metrics.first_token.labels(endpoint).observe(time.perf_counter() - begin)
            await send(message)

        metrics.in_flight.labels(endpoint).inc()
        try:
            await self.app(scope, receive, watched)
        except Exception:
            status = "500"
            raise
        finally:
            metrics.in_flight.labels(endpoint).dec()
            metrics.requests.labels(endpoint, status).inc()
            metrics.latency.labels(endpoint).observe(time.perf_counter() - begin)
