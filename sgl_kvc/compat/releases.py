"""The SGLang releases that are supported, and what differs between them.

A release line is a row of `RELEASES`. Where a line differs from what the hooks and symbols say,
its row says how: a target that moved, one that is gone, a hook instead of another, symbols of
its own. The functions stand beside each other in the topic's file.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping

from sgl_kvc.compat import (
    arguments,
    bounded,
    chat,
    cpu,
    graphs,
    http,
    metrics,
    operations,
    pool,
    requests,
    scheduling,
    segments,
)
from sgl_kvc.compat.hook import Hook, IncompatibleError
from sgl_kvc.compat.symbols import SYMBOLS
from sgl_kvc.compat.uses import Uses

#: What every release has, unless its row says otherwise.
HOOKS = (
    *arguments.HOOKS,
    *scheduling.HOOKS,
    *bounded.HOOKS,
    *pool.HOOKS,
    *graphs.HOOKS,
    *http.HOOKS,
    *chat.HOOKS,
    *segments.HOOKS,
    *requests.HOOKS,
    *operations.HOOKS,
    *metrics.HOOKS,
    *cpu.HOOKS,
)


@dataclasses.dataclass(frozen=True)
class Release:
    """A line of SGLang releases.

    Attributes
    ----------
    line : what the versions begin with, as "0.5.17".
    moved : dotted path, or the beginning of one -> what it is called in this line.
    gone : targets and owners that this line does not have and that are not needed with it.
    hooks : this line's own; one with the target of another replaces it.
    symbols : this line's own; one with the owner of another replaces it.
    register : tells SGLang of attention backend and radix cache by its public seams.
    """

    line: str
    moved: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    hooks: tuple[Hook, ...] = ()
    symbols: tuple[Uses, ...] = ()
    register: Callable[[], None] = pool.register_backends

    def all_hooks(self, *, gpu: bool) -> list[Hook]:
        """This line's hooks; those that only a GPU needs if `gpu`, else those of a CPU."""
        own = {hook.target for hook in self.hooks}
        found = [*(each for each in HOOKS if each.target not in own), *self.hooks]
        return [
            dataclasses.replace(hook, target=self.path(hook.target))
            for hook in found
            if hook.target not in self.gone and not (hook.cpu if gpu else hook.gpu)
        ]

    def all_symbols(self, *, gpu: bool) -> list[Uses]:
        """This line's symbols; those that only a GPU needs if `gpu`."""
        own = {uses.owner for uses in self.symbols}
        found = [*(each for each in SYMBOLS if each.owner not in own), *self.symbols]
        return [
            dataclasses.replace(uses, owner=self.path(uses.owner))
            for uses in found
            if uses.owner not in self.gone and (gpu or not uses.gpu)
        ]

    def path(self, dotted: str) -> str:
        """What `dotted` is called in this line; the longest of `moved` decides."""
        for old in sorted(self.moved, key=len, reverse=True):
            if dotted == old or dotted.startswith(f"{old}."):
                return self.moved[old] + dotted[len(old) :]
        return dotted


RELEASES = (Release("0.5.17"),)


def release(known: Iterable[Release] = RELEASES) -> Release:
    """The row of the installed SGLang. Raises IncompatibleError when there is none."""
    version = importlib.metadata.version("sglang")
    known = tuple(known)
    for each in known:
        rest = version.partition("+")[0].removeprefix(each.line)
        if version.startswith(each.line) and not rest.lstrip(".")[:1].isdigit():
            return each
    lines = ", ".join(sorted(each.line for each in known))
    raise IncompatibleError(f"SGLang {version} is installed; sgl-kvc supports {lines}")
