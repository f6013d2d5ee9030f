"""What a server lets requests ask for, beyond what there is."""

from __future__ import annotations

import dataclasses
from typing import Any

from sgl_kvc.spec import DEFAULT_POLICY, OFF, CompressionSpec, SpecError

#: Fields that keep KVs from being compressed, so that a least rate would mean little.
_KEEPING = ("min_tokens", "prefix_tokens", "question_tokens", "question")


@dataclasses.dataclass(frozen=True)
class KnobLimits:
    """Limits of one gateway, besides its highest rate.

    Attributes
    ----------
    policies : names that may be asked for, also ``scorer+apportioner``; None is all.
    all_queries : whether policies that take nothing from the prefix cache are among them.
    explain : whether requests may ask which KVs were kept: long reports, of a copy of their own.
    max_window : of the policies that look at the last queries, how many.
    min_budget : KVs per head.
    min_recompress_every : decoded tokens between two compressions, where there are any.
    min_rate : requests below are refused, and those that name none get it.
    force_rate : what every request gets, whatever rate or budget it asks for; None is its own.
    """

    policies: frozenset[str] | None = None
    all_queries: bool = True
    explain: bool = True
    max_window: int = 1024
    min_budget: int = 1
    min_recompress_every: int = 16
    min_rate: float = 1.0
    force_rate: float | None = None

    def check(self, spec: CompressionSpec) -> CompressionSpec:
        """The knob as this server serves it. Raises SpecError for what it does not allow."""
        self._check_policy(spec)
        if spec.explain and not self.explain:
            raise SpecError("explain", "is not served here: leave it out")
        window, every = spec.parameters.get("window", 0), spec.recompress_every
        if window > self.max_window:
            raise _limit("window", "at most", self.max_window, window)
        if 0 < every < self.min_recompress_every:
            raise _limit("recompress_every", "0 or at least", self.min_recompress_every, every)
        if self.force_rate is not None:
            kept = {name: getattr(OFF, name) for name in _KEEPING}
            forced = dataclasses.replace(
                spec, rate=self.force_rate, budget=None, on_pressure=False, **kept
            )
            return dataclasses.replace(forced, max_rate=OFF.max_rate)
        if spec.budget is not None and spec.budget < self.min_budget:
            raise _limit("budget", "at least", self.min_budget, spec.budget)
        if self.min_rate > 1:
            self._check_least(spec)
        return spec

    def narrowed(self, **bounds: Any) -> KnobLimits:
        """These limits, or of each the narrower one where `bounds` has it too."""
        other = dataclasses.replace(self, **bounds)
        policies = other.policies
        if self.policies is not None and policies is not None:
            policies &= self.policies
        return KnobLimits(
            policies=self.policies if policies is None else policies,
            all_queries=self.all_queries and other.all_queries,
            explain=self.explain and other.explain,
            max_window=min(self.max_window, other.max_window),
            min_budget=max(self.min_budget, other.min_budget),
            min_recompress_every=max(self.min_recompress_every, other.min_recompress_every),
            min_rate=max(self.min_rate, other.min_rate),
            force_rate=other.force_rate if self.force_rate is None else self.force_rate,
        )

    def _check_policy(self, spec: CompressionSpec) -> None:
        field = "scorer" if "+" in spec.policy else "policy"
        if self.policies is not None and spec.policy not in self.policies:
            allowed = ", ".join(sorted(self.policies))
            raise SpecError(field, f"{spec.policy} is not served here; {allowed} are")
        if spec.all_queries and not self.all_queries:
            raise SpecError(field, f"{spec.policy} looks at all queries; it is not served here")

    def _check_least(self, spec: CompressionSpec) -> None:
        if spec.rate is None:
            least = f"this server compresses at a rate of {self.min_rate:g} or more"
            raise SpecError("budget", f"{least}: give a rate instead")
        if spec.on_pressure:
            raise SpecError("on_pressure", "may leave it whole; this server has a least rate")
        if spec.rate < self.min_rate:
            raise _limit("rate", "at least", self.min_rate, spec.rate)
        if spec.question is not None:
            problem = "would keep tokens whole; this server has a least rate"
            raise SpecError("question", problem)
        for name in _KEEPING[:-1]:
            most = getattr(OFF, name)
            if getattr(spec, name) > most:
                raise _limit(name, "at most", most, getattr(spec, name))


def _limit(field: str, side: str, bound: float, got: float) -> SpecError:
    return SpecError(field, f"must be {side} {bound:g} on this server (got {got:g})")


def default_allowed(limits: KnobLimits) -> bool:
    """Whether requests that name no policy are served."""
    return limits.policies is None or DEFAULT_POLICY in limits.policies
