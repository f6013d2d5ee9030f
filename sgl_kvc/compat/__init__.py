"""What differs between SGLang releases: one module per supported release line.

Everything that reaches into SGLang's insides is a `Hook` in the release's module, with the
upstream symbol it takes and the reason. `release()` picks the module; an SGLang without one
is refused at startup, by name.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable
from typing import Any

#: SGLang release line -> module here.
RELEASES = {"0.5.17": "sglang_0_5_17"}


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
    """

    target: str
    kind: str
    function: Callable[..., Any]
    reason: str


def release():
    """The module for the installed SGLang. Raises IncompatibleError when there is none."""
    version = importlib.metadata.version("sglang")
    line = next((line for line in RELEASES if version.split("+")[0].startswith(line)), None)
    if line is None or version.split("+")[0].removeprefix(line).lstrip(".")[:1].isdigit():
        known = ", ".join(sorted(RELEASES))
        raise IncompatibleError(f"SGLang {version} is installed; sgl-kvc supports {known}")
    return importlib.import_module(f"sgl_kvc.compat.{RELEASES[line]}")


def check_seams(hooks: list[Hook]) -> None:
    """Raise IncompatibleError naming the first upstream symbol that is not there."""
    for hook in hooks:
        try:
            found = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            raise IncompatibleError(
                f"SGLang has no {hook.target}, which sgl-kvc needs ({hook.reason})"
            ) from error
        if not callable(found):
            raise IncompatibleError(f"{hook.target} is not callable in this SGLang")


def serving_with_kvc() -> bool:
    """True in a process that serves with our attention backend."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().kernel.attention_backend == "kvc"
