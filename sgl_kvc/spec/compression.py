"""One request's compression, as it is asked for: what a knob can say, and what that means."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping
from typing import Any

from sgl_kvc.spec.catalogue import methods
from sgl_kvc.spec.presets import DEFAULT_POLICY, MIN_RECENT, PRESETS

MAX_RATE = 1024.0
INTEGERS = {  # field: (min, max)
    "budget": (1, 1 << 24),
    "sinks": (0, 4096),
    "recent": (0, 4096),
    "min_tokens": (0, 1 << 24),
    "prefix_tokens": (0, 1 << 24),
    "question_tokens": (0, 1 << 24),
    "recompress_every": (0, 1 << 24),
    "prefill_block": (0, 1 << 24),
    "hold_s": (0, 86400),
}
SWITCHES = ("force", "explain")
#: What `question` can be.
LAST_MESSAGE = "last_message"
CHOICES = {"question": (LAST_MESSAGE,), "reuse": ("full", "compressed", "both")}
ON_PRESSURE = "on_pressure"
FIELDS = (
    "rate", ON_PRESSURE, "max_rate", "policy", "scorer", "apportioner",
    *INTEGERS, *SWITCHES, *CHOICES,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CompressionSpec:
    """A validated knob. Exactly one of `rate` and `budget` is set.

    Attributes
    ----------
    rate : KVs before / KVs after, in [1, MAX_RATE]; 1 means off.
    budget : mean KVs to keep per head, in tokens.
    max_rate : the rate that a budget comes to at most: of a longer prompt more is kept.
    policy : the preset's name, or ``scorer+apportioner`` when these were named.
    parameters : every parameter of scorer and apportioner, by name.
    sinks : first positions that are always kept.
    recent : last positions of what is compressed that are always kept, up to a quarter of what a
        head keeps on average.
    min_tokens : prompts shorter than this are served uncompressed.
    prefix_tokens : the prompt's first tokens, kept whole and shared with other requests; only
        what follows is compressed.
    question_tokens : the prompt's last tokens, read only after compression, as a later turn's
        would be; no score sees them. What precedes them is compressed once for all requests that
        agree in it and in the knob.
    question : "last_message", where the server is to count them in a chat: from where the last
        message's content begins.
    reuse : what a request may begin with, and what it leaves. None or "full": KVs of the very
        tokens. "compressed": the longest stored segment of its prompt too, what a chat's turn
        before has left; "both": whichever covers more of the prompt. Then the result also depends
        on what the turns before were compressed by.
    on_pressure : whether it stays uncompressed until memory is short, and is compressed to `rate`
        only then, instead of being retracted or of letting others wait.
    force : compress even where the copy takes more memory than it frees, because most of the
        prompt is shared with others that run; then the result depends on the request alone.
    recompress_every : decoded tokens after which segment and tail are compressed again, by what
        `continual` says (attention: arXiv 2410.00161, eq. 20); 0 is never. With `on_pressure`
        only if memory is short again by then; there 0 is where somebody would be retracted.
    prefill_block : tokens after which what has come in of a prompt is compressed, while it is
        prefilled; 0 is at its end. So much and the budget is what it holds then at most.
    hold_s : seconds for which the prefix cache keeps what the request leaves, longer than what
        nobody holds: what a program that pauses will need. Not a lock.
    explain : report which KVs every head kept, not only how many.
    """

    rate: float | None = None
    budget: int | None = None
    max_rate: float = MAX_RATE
    policy: str = DEFAULT_POLICY
    scorer: str = PRESETS[DEFAULT_POLICY].scorer
    apportioner: str = PRESETS[DEFAULT_POLICY].apportioner
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sinks: int = PRESETS[DEFAULT_POLICY].sinks
    recent: int = MIN_RECENT
    min_tokens: int = 64
    prefix_tokens: int = 0
    question_tokens: int = 0
    question: str | None = None
    reuse: str | None = None
    on_pressure: bool = False
    recompress_every: int = 0
    prefill_block: int = 0
    hold_s: int = 0
    force: bool = False
    explain: bool = False

    @property
    def off(self) -> bool:
        """True when the request is to be served uncompressed."""
        return self.rate == 1

    @property
    def window(self) -> int:
        """Last queries of what is compressed that have to be computed."""
        return self.parameters.get("window", 1)

    @property
    def all_queries(self) -> bool:
        """Whether every query has to be computed, so that nothing may come from a cache."""
        return methods("scorers")[self.scorer].all_queries

    @property
    def continual(self) -> str | None:
        """What KVs are chosen by when a request is compressed again in decode.

        "squared attention" or "attention", what decode's queries paid them, added to their scores;
        "position", the newest; "rescored", the scorer's `rescore`; None if the policy cannot go on.
        """
        kind = methods("scorers")[self.scorer].continual
        if not kind or not methods("apportioners")[self.apportioner].continual:
            return None
        if kind == "attention" and self.parameters.get("norm", "l2") == "l2":
            return "squared attention"
        return str(kind)

    @property
    def goes_on(self) -> bool:
        """Whether what it holds may be compressed again while it decodes.

        With `recompress_every`; with `on_pressure` by itself, where the policy needs not know when.
        """
        if self.recompress_every:
            return True
        return self.on_pressure and not self.explain and self.continual not in (None, "rescored")

    @property
    def shape(self) -> Hashable:
        """All of the knob that shapes what is kept of given tokens, but `prefix_tokens`."""
        size = (self.rate, self.budget, self.max_rate, self.prefill_block)
        parameters = tuple(sorted(self.parameters.items()))
        return (*size, self.scorer, self.apportioner, parameters, self.sinks, self.recent)

    def blocks_for(self, whole: int, page_size: int) -> int:
        """Blocks that `whole` blocks of `page_size` tokens are compressed to, at least 1."""
        if self.budget is not None:
            wanted = math.ceil(max(self.budget / page_size, whole / self.max_rate))
        else:
            assert self.rate is not None  # one of the two is set
            wanted = math.ceil(whole / self.rate)
        return max(1, min(wanted, whole))

    def to_json(self) -> dict[str, Any]:
        """The knob that `parse` would turn into this spec, for ``custom_params``."""
        fields = {
            name: getattr(self, name)
            for name in ("rate", *INTEGERS)
            if getattr(self, name) is not None
        }
        if self.on_pressure:
            fields[ON_PRESSURE] = fields.pop("rate")
        fields |= self.parameters
        if self.max_rate != MAX_RATE:
            fields["max_rate"] = self.max_rate
        fields |= {name: True for name in SWITCHES if getattr(self, name)}
        for name in CHOICES:
            if getattr(self, name) is not None:
                fields[name] = getattr(self, name)
        if self.policy in PRESETS:
            return fields | {"policy": self.policy}
        return fields | {"scorer": self.scorer, "apportioner": self.apportioner}
