"""How it is said what we rely on of SGLang's."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Uses:
    """What we rely on of a module or class of SGLang's.

    Attributes
    ----------
    owner : dotted path of the module or class.
    names : separated by spaces: functions of the module; or methods, fields and attributes of the
        class and of its instances. Parameters that must be there in parentheses, without spaces:
        "match_prefix(params)". Empty where the owner itself is all that is needed.
    reason : what for.
    gpu : checked only where there is a GPU: importing the owner costs seconds.
    """

    owner: str
    names: str
    reason: str
    gpu: bool = False
