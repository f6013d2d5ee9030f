"""``"elastic": {"max_rate": 16}`` in a knob: raise the rate, where the request would wait else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sgl_kvc.spec import CompressionSpec, SpecError, parse_rate

FIELD = "elastic"


@dataclasses.dataclass(frozen=True)
class Elastic:
    """The rate that a request asked for, and the one it may be raised to."""

    asked: float
    max_rate: float

    def report(self, given: float | None) -> dict[str, Any]:
        """What the response tells. `given` is the rate it was raised to; None if it was not."""
        raised = self.asked if given is None else given
        return {"asked": self.asked, "max_rate": self.max_rate, "given": raised}


def split(knob: Any) -> tuple[Any, Any]:
    """A knob without the field, and the field's value; None if it is not there."""
    if not isinstance(knob, Mapping) or knob.get(FIELD) is None:
        return knob, None
    return {name: value for name, value in knob.items() if name != FIELD}, knob[FIELD]


def checked(value: Any, spec: CompressionSpec, max_rate: float) -> Elastic | None:
    """What the field of a knob asks for. Raises SpecError.

    Parameters
    ----------
    spec : the knob it stands in.
    max_rate : the server's.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) != {"max_rate"}:
        raise SpecError(FIELD, 'must be an object such as {"max_rate": 16}')
    if spec.rate is None or spec.on_pressure:
        raise SpecError(FIELD, "raises a rate; give rate instead of budget or on_pressure")
    most = parse_rate(value["max_rate"], max_rate=max_rate, field=FIELD)
    if most < spec.rate:
        raise SpecError(FIELD, f"max_rate must be at least the rate, {spec.rate:g}")
    return Elastic(spec.rate, most)
