"""What the gateway is told at start: one frozen object, checked once."""

from __future__ import annotations

import dataclasses
import math
from urllib.parse import urlsplit

from kvc_server.knob_limits import KnobLimits, default_allowed
from kvc_server.limits import Limits
from kvc_server.memory import Waiting
from kvc_server.probe import Watch
from sgl_kvc.spec import DEFAULT_POLICY, MAX_RATE, SpecError, parse, parse_rate

OWNED_WORKER_OPTIONS = {
    "--host": "its own stands before --", "--port": "its own stands before --",
    "--api-key": "its worker gets one that nobody else knows",
    "--admin-api-key": "its worker gets one that nobody else knows",
}  # fmt: skip


class SettingsError(ValueError):
    """An option that cannot be used; the message names it and says what to give instead."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of one gateway. Exactly one of `worker_url` and `model_path` is set.

    Attributes
    ----------
    worker_url : a running SGLang worker or router; None starts a worker of our own.
    model_path : the model our own worker serves, a folder or a Hugging Face id.
    worker_args : passed to SGLang verbatim after ours, so that they win.
    default_rate : rate of requests that name none; 1 means off.
    max_rate : the ceiling; requests above it are refused.
    connect_timeout : seconds to reach the worker.
    read_timeout : seconds of silence from the worker before giving up; None waits forever.
    limits : what a client may cost before its request begins, and how long a stop waits.
    knob_limits : what requests may ask for besides.
    room : how requests wait for room in the worker's KV pool; None sends them on at once.
    watch : how the worker is watched.
    keys : the file of API keys; None lets everybody in.
    access_log : file for a line of JSON per request, "-" for stdout; None writes none.
    traces : export OpenTelemetry spans.
    cors_origins : origins whose pages may call us from a browser; "*" is all.
    """

    worker_url: str | None = None
    model_path: str | None = None
    worker_args: tuple[str, ...] = ()
    default_rate: float = 1.0
    max_rate: float = MAX_RATE
    connect_timeout: float = 5.0
    read_timeout: float | None = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    knob_limits: KnobLimits = dataclasses.field(default_factory=KnobLimits)
    room: Waiting | None = None
    watch: Watch = dataclasses.field(default_factory=Watch)
    keys: str | None = None
    access_log: str | None = None
    traces: bool = False
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise SettingsError for the first option that cannot be used."""
        if (self.worker_url is None) == (self.model_path is None):
            raise SettingsError("give either --worker-url or --model-path")
        if self.worker_url is not None:
            _check_url(self.worker_url)
            if self.worker_args:
                raise SettingsError(
                    "arguments after -- go to the worker the gateway starts; "
                    "with --worker-url it starts none"
                )
        for argument in self.worker_args:
            if (option := argument.split("=")[0]) in OWNED_WORKER_OPTIONS:
                why = OWNED_WORKER_OPTIONS[option]
                raise SettingsError(f"{option} after -- is the gateway's to choose; {why}")
        for origin in self.cors_origins:
            _check_origin(origin)
        _check_rate("--max-rate", self.max_rate, MAX_RATE)
        _check_rate("--default-rate", self.default_rate, self.max_rate)
        knob = self.knob_limits
        _check_rate("--min-rate", knob.min_rate, self.max_rate)
        if knob.force_rate is not None:
            _check_rate("--force-rate", knob.force_rate, self.max_rate)
        if not default_allowed(knob):
            raise SettingsError(
                f"--policies must name {DEFAULT_POLICY}: requests that name none use it"
            )
        for name in knob.policies or ():
            _check_policy(name)
        amounts = dataclasses.asdict(self.limits) | dataclasses.asdict(self.watch)
        for option in ("max_body", "max_in_flight"):
            if (amount := amounts.pop(option)) < 1:
                name = "--" + option.replace("_", "-")
                raise SettingsError(f"{name} must be a positive number (got {amount})")
        if self.room is not None:
            amounts["queue_timeout"] = self.room.timeout
            if self.room.most < 0:
                raise SettingsError(f"--queue must not be negative (got {self.room.most})")
        amounts |= {"connect_timeout": self.connect_timeout, "read_timeout": self.read_timeout}
        for option, seconds in amounts.items():
            if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
                name = "--" + option.replace("_", "-")
                raise SettingsError(f"{name} must be a positive number of seconds (got {seconds})")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise SettingsError(f"--worker-url must look like http://host:30000 (got {url!r})")


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    if origin != "*" and origin != f"{parts.scheme}://{parts.netloc}":
        raise SettingsError(f"--cors-origin must look like https://app.example (got {origin!r})")


def _check_policy(name: str) -> None:
    scorer, plus, apportioner = name.partition("+")
    asked = {"scorer": scorer, "apportioner": apportioner} if plus else {"policy": name}
    try:
        parse({"rate": 1, **asked})
    except SpecError as error:
        raise SettingsError(f"--policies: {name}: {error.problem}") from None


def _check_rate(option: str, rate: float, max_rate: float) -> None:
    try:
        parse_rate(rate, max_rate=max_rate)
    except SpecError as error:
        raise SettingsError(f"{option}: {error.problem}") from None
