"""What a hook into SGLang is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


class IncompatibleError(RuntimeError):
    """This SGLang cannot be served with. The message names the version or the symbol."""


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function of SGLang's that we run code around.

    Attributes
    ----------
    target : dotted path of the upstream function or method.
    kind : name of a member of SGLang's ``HookType``.
    function : called as that kind of hook is.
    reason : why there is no public seam that would do.
    gpu : taken only where there is a GPU: importing what it names costs seconds.
    cpu : taken only where there is none.
    """

    target: str
    kind: str
    function: Callable[..., Any]
    reason: str
    gpu: bool = False
    cpu: bool = False
