"""Options of `sgl-kvc serve` about what it survives: limits, deadlines, restarts."""

from __future__ import annotations

import argparse

from kvc_server.knob_limits import KnobLimits
from kvc_server.limits import MIB, Limits
from kvc_server.memory import Waiting
from kvc_server.probe import Watch

_OPTIONS = (  # name, its default and unit, what it is
    ("--start-timeout", Watch.start_timeout, "S", "seconds in which the worker has to be ready"),
    ("--hang-timeout", Watch.hang_timeout, "S", "seconds a silent worker has until a restart"),
    ("--drain-timeout", Limits.drain_timeout, "S", "seconds a stop waits for requests in flight"),
    ("--header-timeout", Limits.header_timeout, "S", "seconds for a request's headers"),
    ("--body-timeout", Limits.body_timeout, "S", "seconds for a request's body"),
    ("--max-body", Limits.max_body // MIB, "MIB", "largest body of a request, in MiB"),
    ("--max-window", KnobLimits.max_window, "N", "largest window a request may ask for"),
    ("--min-budget", KnobLimits.min_budget, "N", "least budget a request may ask for"),
    ("--min-recompress-every", KnobLimits.min_recompress_every, "N", "its least recompress_every"),
    ("--min-rate", KnobLimits.min_rate, "RATE", "lowest rate a request may ask for"),
    ("--queue-timeout", Waiting.timeout, "S", "seconds a request waits for room in the pool"),
    ("--queue", Waiting.most, "N", "requests that wait for it; more are told to come back"),
    ("--max-in-flight", Limits.max_in_flight, "N", "requests at once; more are told to wait"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options to `serve`."""
    for name, default, unit, about in _OPTIONS:
        parser.add_argument(
            name, type=type(default), default=default, metavar=unit,
            help=f"{about} (default: %(default)g)",
        )  # fmt: skip
    add = parser.add_argument
    add("--policies", metavar="NAMES",
        help="the policies that may be asked for, by commas (default: all)")  # fmt: skip
    add("--no-all-queries", action="store_true",
        help="refuse policies that take nothing from the prefix cache")  # fmt: skip
    add("--no-explain", action="store_true",
        help="refuse reports of which KVs were kept")  # fmt: skip
    add("--force-rate", type=float, metavar="RATE",
        help="the rate of every request, whatever it asks for")  # fmt: skip
    add("--admit-by-memory", action="store_true",
        help="let requests in while the KV pool has room for them; others wait here")  # fmt: skip
    add("--keys", metavar="FILE",
        help="the file of API keys (sgl-kvc key); without it everybody is served")  # fmt: skip
    add("--access-log", metavar="FILE",
        help="write a line of JSON per request to it, - is stdout")  # fmt: skip
    add("--traces", action="store_true",
        help="export OpenTelemetry spans, as OTEL_EXPORTER_OTLP_ENDPOINT says")  # fmt: skip
    add("--cors-origin", action="append", default=[], metavar="ORIGIN",
        help="let pages of this origin call us, * of any; may be given again")  # fmt: skip


def knob_limits_of(options: argparse.Namespace) -> KnobLimits:
    """What requests may ask for."""
    names = options.policies
    return KnobLimits(
        policies=None if names is None else frozenset(name.strip() for name in names.split(",")),
        all_queries=not options.no_all_queries,
        explain=not options.no_explain,
        max_window=options.max_window,
        min_budget=options.min_budget,
        min_recompress_every=options.min_recompress_every,
        min_rate=options.min_rate,
        force_rate=options.force_rate,
    )


def limits_of(options: argparse.Namespace) -> Limits:
    """The limits that were given."""
    return Limits(
        max_body=options.max_body * MIB,
        max_in_flight=options.max_in_flight,
        header_timeout=options.header_timeout,
        body_timeout=options.body_timeout,
        drain_timeout=options.drain_timeout,
    )


def room_of(options: argparse.Namespace) -> Waiting | None:
    """How requests wait for room in the worker's KV pool."""
    return Waiting(options.queue_timeout, options.queue) if options.admit_by_memory else None


def watch_of(options: argparse.Namespace) -> Watch:
    """How the worker is to be watched."""
    return Watch(start_timeout=options.start_timeout, hang_timeout=options.hang_timeout)
