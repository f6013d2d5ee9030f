"""Whether the SGLang that is installed has what we rely on; checked before anything is served.

No object of SGLang's is made for it: attributes that its methods set are found in their bytecode.
"""

from __future__ import annotations

import dis
import inspect
import pkgutil
import types
from collections.abc import Iterable
from typing import Any

from sgl_kvc.compat.hook import Hook, IncompatibleError
from sgl_kvc.compat.uses import Uses


def check_hooks(hooks: Iterable[Hook]) -> None:
    """Raise IncompatibleError naming the first hooked function that is not there."""
    for hook in hooks:
        if not callable(_resolve(hook.target, hook.reason)):
            raise IncompatibleError(f"{hook.target} is not callable in this SGLang")


def check_symbols(symbols: Iterable[Uses]) -> None:
    """Raise IncompatibleError naming the first symbol or parameter that is not there."""
    for uses in symbols:
        owner = _resolve(uses.owner, uses.reason)
        for written in uses.names.split():
            name, _, parameters = written.rstrip(")").partition("(")
            symbol = f"{uses.owner}.{name}"
            if not has(owner, name):
                raise _missing(symbol, uses.reason)
            wanted = [each for each in parameters.split(",") if each]
            given = parameters_of(getattr(owner, name)) if wanted else ()
            for parameter in wanted:
                if parameter not in given:
                    raise _missing(f"{symbol}({parameter})", uses.reason)


def has(owner: Any, name: str) -> bool:
    """Whether a module has a name, or a class or its instances an attribute.

    An attribute of instances counts when a class of the MRO declares it or one of its methods
    assigns it to `self`.
    """
    if hasattr(owner, name):
        return True
    if not isinstance(owner, type):
        return False
    return any(name in inspect.get_annotations(cls) or _assigns(cls, name) for cls in owner.__mro__)


def parameters_of(function: Any) -> list[str]:
    """Names of a callable's parameters; for a class, those that make an instance."""
    return list(inspect.signature(function).parameters)


def _resolve(path: str, reason: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise _missing(path, reason) from error


def _missing(symbol: str, reason: str) -> IncompatibleError:
    return IncompatibleError(f"SGLang has no {symbol}, which sgl-kvc needs ({reason})")


def _assigns(cls: type, name: str) -> bool:
    """Whether a method that the class itself defines assigns ``self.name``."""
    for member in vars(cls).values():
        function = inspect.unwrap(member) if callable(member) else None
        if not isinstance(function, types.FunctionType) or name not in function.__code__.co_names:
            continue
        itself, before = function.__code__.co_varnames[:1], None
        for step in dis.get_instructions(function):
            if step.opname == "STORE_ATTR" and step.argval == name and (before,) == itself:
                return True
            before = step.argval
    return False
