"""The error for a knob that cannot be used."""

from __future__ import annotations

#: Name of the knob in a request body and in SGLang's ``custom_params``.
CUSTOM_PARAM = "kv_compression"
#: Beside it: the request is there to pin the segment of its prompt.
PIN_PARAM = "kv_cache_pin"
#: Beside it: when the request arrived, seconds since 1970, the same for all ranks.
TIME_PARAM = "kv_cache_time"


class SpecError(ValueError):
    """A knob that cannot be used. The message is ``<field>: <problem>``.

    Parameters
    ----------
    name : field of the knob, such as ``rate``; empty for the knob as a whole.

    Attributes
    ----------
    field : `name` dotted from the request body's root, such as ``kv_compression.rate``.
    problem : what is wrong and how to fix it, without the field.
    """

    def __init__(self, name: str, problem: str):
        self.name, self.problem = name, problem
        self.field = self.at(CUSTOM_PARAM)
        super().__init__(f"{self.field}: {problem}")

    def at(self, knob: str) -> str:
        """The field's dotted path in a body that holds the knob at path `knob`."""
        return f"{knob}.{self.name}" if self.name else knob
