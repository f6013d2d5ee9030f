"""The compression knob of one request: parse, validate, presets.

This module imports neither torch nor SGLang, so that the gateway can refuse a bad knob
before the engine sees it, with the same rules the engine uses.

The knob is a flat JSON object (SGLang carries it as ``custom_params["kv_compression"]``,
whose nested values must be scalars)::

    {"rate": 8}                                  KVs before / KVs after, 1 means off
    {"budget": 1024}                             mean KVs kept per head
    {"rate": 8, "policy": "snapkv"}              a preset
    {"rate": 8, "scorer": "attention-window", "apportioner": "uniform"}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_RATE = 1024.0
DEFAULT_POLICY = "kv-compress"
CUSTOM_PARAM = "kv_compression"


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named policy: a scorer, an apportioner and the parameters of its paper."""

    scorer: str
    apportioner: str
    source: str
    window: int = 8
    pool: int = 7
    sinks: int = 4


PRESETS: dict[str, Preset] = {
    "kv-compress": Preset("attention-window", "global", "arXiv 2410.00161"),
    "snapkv": Preset("attention-window-l1", "uniform", "arXiv 2404.14469", window=32),
    "streaming-llm": Preset("recency", "uniform", "arXiv 2309.17453", window=1, pool=1),
    "random": Preset("random", "uniform", "baseline", window=1, pool=1),
}


class SpecError(ValueError):
    """A knob that cannot be used.

    Attributes
    ----------
    field : the offending field, dotted from the request body's root
        (for example ``kv_compression.rate``).
    """

    def __init__(self, field: str, problem: str):
        self.field = f"{CUSTOM_PARAM}.{field}" if field else CUSTOM_PARAM
        super().__init__(f"{self.field}: {problem}")


@dataclasses.dataclass(frozen=True)
class CompressionSpec:
    """A validated knob. Exactly one of `rate` and `budget` is set.

    Attributes
    ----------
    rate : KVs before / KVs after, in [1, MAX_RATE]; 1 means off.
    budget : mean KVs to keep per head, in tokens.
    policy : the preset's name, or ``scorer+apportioner`` when these were named.
    window : last query tokens a window scorer looks at.
    pool : width of the max-pool over neighbouring keys, odd, 1 is none.
    sinks : first positions that are always kept.
    min_tokens : prompts shorter than this are served uncompressed.
    """

    rate: float | None = None
    budget: int | None = None
    policy: str = DEFAULT_POLICY
    scorer: str = PRESETS[DEFAULT_POLICY].scorer
    apportioner: str = PRESETS[DEFAULT_POLICY].apportioner
    window: int = PRESETS[DEFAULT_POLICY].window
    pool: int = PRESETS[DEFAULT_POLICY].pool
    sinks: int = PRESETS[DEFAULT_POLICY].sinks
    min_tokens: int = 64

    @property
    def off(self) -> bool:
        """True when the request is to be served uncompressed."""
        return self.rate == 1

    def segment_blocks(self, prompt_tokens: int, page_size: int) -> int:
        """Blocks that the whole blocks of a prompt are compressed to; known before any score."""
        whole = prompt_tokens // page_size
        if self.budget is not None:
            wanted = math.ceil(self.budget / page_size)
        else:
            wanted = math.ceil(whole / self.rate)
        return max(1, min(wanted, whole))

    def reason_to_skip(self, prompt_tokens: int, page_size: int) -> str | None:
        """Why a prompt of this length cannot be compressed as asked; None when it can."""
        if prompt_tokens < self.min_tokens:
            least = f"min_tokens ({self.min_tokens})"
            return f"the prompt's {prompt_tokens} tokens are fewer than {least}"
        whole = prompt_tokens // page_size
        if whole <= 1 or self.segment_blocks(prompt_tokens, page_size) >= whole:
            return f"nothing to remove: the prompt fills {whole} whole blocks of {page_size} tokens"
        return None

    def to_json(self) -> dict[str, Any]:
        """The knob that `parse` would turn into this spec, for ``custom_params``."""
        fields = {
            name: getattr(self, name)
            for name in ("rate", "budget", "window", "pool", "sinks", "min_tokens")
            if getattr(self, name) is not None
        }
        if self.policy in PRESETS:
            return fields | {"policy": self.policy}
        return fields | {"scorer": self.scorer, "apportioner": self.apportioner}


OFF = CompressionSpec(rate=1)

_INTEGERS = {  # field: (least, most)
    "budget": (1, 1 << 24),
    "window": (1, 1024),
    "pool": (1, 255),
    "sinks": (0, 4096),
    "min_tokens": (0, 1 << 24),
}
FIELDS = ("rate", "policy", "scorer", "apportioner", *_INTEGERS)


def parse(knob: Any, *, max_rate: float = MAX_RATE) -> CompressionSpec:
    """Turn the JSON value of ``kv_compression`` into a spec.

    Parameters
    ----------
    knob : the JSON value; None means off.
    max_rate : the server's ceiling; higher rates are refused.

    Raises
    ------
    SpecError : naming the field and the fix.
    """
    if knob is None:
        return OFF
    if not isinstance(knob, Mapping):
        raise SpecError("", 'must be an object such as {"rate": 8}, or null')
    for key in knob:
        if key not in FIELDS:
            raise SpecError(str(key), f"unknown field; known are {', '.join(FIELDS)}")
    given = {key: value for key, value in knob.items() if value is not None}
    if "rate" in given and "budget" in given:
        raise SpecError("budget", "give either rate or budget, not both")
    if "rate" not in given and "budget" not in given:
        raise SpecError("rate", "one of rate and budget is required")
    values: dict[str, Any] = _policy(given)
    if "rate" in given:
        values["rate"] = parse_rate(given["rate"], max_rate=max_rate)
    for name, (least, most) in _INTEGERS.items():
        if name in given:
            values[name] = _integer(name, given[name], least, most)
    if values["pool"] % 2 == 0:
        raise SpecError("pool", "must be odd, so that it is centred on a key")
    return CompressionSpec(**values)


def parse_rate(value: Any, *, max_rate: float = MAX_RATE) -> float:
    """A rate in [1, max_rate]; raises SpecError otherwise. JSON numbers only."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        problem = f"must be a finite number, KVs before / KVs after (got {_short(value)})"
        raise SpecError("rate", problem)
    if value < 1:
        raise SpecError("rate", f"must be at least 1, which means off (got {_short(value)})")
    if value > max_rate:
        problem = f"must be at most {max_rate:g} on this server (got {_short(value)})"
        raise SpecError("rate", problem)
    return float(value)


def method_names(family: str) -> list[str]:
    """Names of the scorers or apportioners there are: one per file of the family's folder.

    Read from the file names, so that no method has to be imported (they need torch).
    """
    folder = Path(__file__).parent / "policy" / family
    return sorted(
        path.stem.replace("_", "-") for path in folder.glob("*.py") if not path.stem.startswith("_")
    )


def _policy(given: Mapping[str, Any]) -> dict[str, Any]:
    named = [key for key in ("scorer", "apportioner") if key in given]
    if "policy" in given and named:
        raise SpecError(named[0], "give either policy or scorer and apportioner, not both")
    if len(named) == 1:
        missing = "apportioner" if named == ["scorer"] else "scorer"
        raise SpecError(missing, f"is required beside {named[0]}")
    if named:
        for key in named:
            _one_of(key, given[key], method_names(f"{key}s"))
        scorer, apportioner = given["scorer"], given["apportioner"]
        name, preset = f"{scorer}+{apportioner}", Preset(scorer, apportioner, "")
    else:
        name = given.get("policy", DEFAULT_POLICY)
        _one_of("policy", name, sorted(PRESETS))
        preset = PRESETS[name]
    values = dataclasses.asdict(preset)
    del values["source"]
    return values | {"policy": name}


def _one_of(field: str, value: Any, known: list[str]) -> None:
    if value not in known:
        raise SpecError(field, f"unknown {field} {_short(value)}; known are {', '.join(known)}")


def _integer(field: str, value: Any, least: int, most: int) -> int:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not least <= value <= most:
        problem = f"must be a whole number from {least} to {most} (got {_short(value)})"
        raise SpecError(field, problem)
    return int(value)


def _short(value: Any) -> str:
    """The value as the client gave it, cut to what fits a message."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
