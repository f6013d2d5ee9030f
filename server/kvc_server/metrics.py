"""The gateway's own Prometheus metrics."""

from __future__ import annotations

import re
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvc_server.record import Record
from kvc_server.routes import GENERATING

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_RATES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
_MAX_REASONS = 32


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
        self.inter_token = Histogram(
            "kvc_inter_token_seconds", "Between two parts of a streamed answer, one token mostly.",
            ["endpoint"], buckets=_TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        self.rate_achieved = Histogram(
            "kvc_rate_achieved", "KVs before / KVs after of what was compressed.",
            buckets=_RATES, registry=registry,
        )  # fmt: skip
        self.tokens = Counter(
            "kvc_tokens", "Tokens of prompts and answers, by the name of the key.",
            ["tenant", "of"], registry=registry,
        )  # fmt: skip
        self.tenant_requests = Counter(
            "kvc_tenant_requests", "Requests answered, by the name of the key.",
            ["tenant", "status"], registry=registry,
        )  # fmt: skip
        self.in_flight = Gauge(
            "kvc_requests_in_flight", "Requests being served.", ["endpoint"], registry=registry
        )
        self.broken_streams = Counter(
            "kvc_broken_streams", "Streams that ended in an error event.",
            ["endpoint"], registry=registry,
        )  # fmt: skip
        for path in GENERATING:  # from 0 on: of a first sample Prometheus sees no increase
            self.broken_streams.labels(path)
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
        self.knobs_lost = Counter(
            "kvc_knobs_lost", "Requests whose knob did not reach the worker.", registry=registry
        )
        self.memory_blocks = Gauge(
            "kvc_admission_blocks", "Blocks predicted for admitted requests, and of the pool.",
            ["of"], registry=registry,
        )  # fmt: skip
        self.memory_waiting = Gauge(
            "kvc_admission_waiting", "Requests that wait for room in the pool.", registry=registry
        )
        self.memory_wait = Histogram(
            "kvc_admission_wait_seconds", "For which admitted requests waited for room.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.raised = Counter(
            "kvc_rates_raised", "Requests whose rate was raised for want of room.",
            registry=registry,
        )  # fmt: skip
        self._reasons: set[str] = set()

    def observe(self, record: Record) -> None:
        """Count one request that is over."""
        self.requests.labels(record.endpoint, record.status).inc()
        self.latency.labels(record.endpoint).observe(record.seconds)
        if record.first_s is not None:
            self.first_token.labels(record.endpoint).observe(record.first_s)
        if record.tenant is not None:
            self.tenant_requests.labels(record.tenant, record.status).inc()
        if record.knob_lost:
            self.knobs_lost.inc()
        for result in record.results:
            self.observe_result(result)
            for of in ("prompt", "completion"):
                count = result.get(f"{of}_tokens") if isinstance(result, dict) else None
                if isinstance(count, int) and count > 0:
                    self.tokens.labels(record.tenant or "", of).inc(count)

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
        achieved = result.get("rate_achieved")
        if isinstance(result.get("policy"), str) and isinstance(achieved, (int, float)):
            self.rate_achieved.observe(achieved)
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
