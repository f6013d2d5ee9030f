"""What the scheduler adds to SGLang's own metrics: what holds the pool's blocks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sgl_kvc.compat.hook import Hook

if TYPE_CHECKING:
    from sgl_kvc.cache.radix import CompressingRadixCache

_INTERVAL_S = 1.0


class PoolMetrics:
    """Prometheus metrics of one scheduler's pool, in the folder that SGLang's own are in."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge  # once SGLang has named that folder

        self.written = 0.0
        self.blocks = Gauge(
            "kvc_pool_blocks",
            "Blocks of the KV pool by what holds them: the prefix tree, segments of compressed "
            "prompts, tails (all else that running requests own), or nothing (free).",
            ["kind"],
            multiprocess_mode="mostrecent",
        )
        self.seconds = Counter(
            "kvc_compaction_seconds", "Time the scheduler spent compressing; on a GPU without "
            "the kernels it started.",
        )  # fmt: skip
        self.compactions = Counter("kvc_compactions", "Prompts and tails that were compressed.")


def report_pool(_result: Any, reporter: Any, *_: Any, **__: Any) -> None:
    """``SchedulerMetricsReporter``'s reports: once a second at most."""
    from sgl_kvc.cache.radix import CompressingRadixCache

    cache = reporter.scheduler.tree_cache
    if not reporter.current_scheduler_metrics_enabled:
        return
    if not isinstance(cache, CompressingRadixCache):
        return
    metrics = reporter.__dict__.get("kvc_metrics")
    if metrics is None:
        metrics = reporter.kvc_metrics = PoolMetrics()
    now = time.monotonic()
    if now < metrics.written + _INTERVAL_S:
        return
    metrics.written = now
    for kind, blocks in blocks_by_kind(cache).items():
        metrics.blocks.labels(kind).set(blocks)
    count, seconds = cache.compactions.take()
    metrics.compactions.inc(count)
    metrics.seconds.inc(seconds)


def blocks_by_kind(cache: CompressingRadixCache) -> dict[str, int]:
    """Blocks of the prefix tree, of segments, free ones, and tails: what requests own besides."""
    allocator, page = cache.token_to_kv_pool_allocator, cache.page_size
    free = allocator.available_size() // page
    tree = (cache.evictable_size() + cache.protected_size()) // page
    requests = cache.pool.requests.values()
    segment = sum(request.segment.blocks for request in requests if request.segment is not None)
    tail = max(0, allocator.size // page - free - tree - segment)
    return {"tree": tree, "segment": segment, "tail": tail, "free": free}


_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"

HOOKS = tuple(
    Hook(f"{_REPORTER}.{method}", "AFTER", report_pool, "upstream's metrics know no segments")
    for method in ("report_prefill_stats", "report_decode_stats", "_maybe_log_idle_metrics")
)
