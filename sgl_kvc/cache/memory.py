"""What scorers that look at every query saw of prompts they have seen before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch


class StateMemory:
    """States of all layers by prompt and method, the least recently used forgotten first.

    A scorer with ``observe`` needs every query of a prompt, so a prompt that it has not seen
    cannot be taken from the prefix cache. One that it has seen can.

    Parameters
    ----------
    limit : bytes of tensors that are held.
    """

    def __init__(self, limit: int = 64 << 20):
        self.limit = limit
        self.held = 0
        self._states: OrderedDict[Hashable, list[Any]] = OrderedDict()

    def get(self, key: Hashable) -> list[Any] | None:
        """The states of all layers, None if they are not known."""
        states = self._states.get(key)
        if states is not None:
            self._states.move_to_end(key)
        return states

    def put(self, key: Hashable, states: list[Any]) -> None:
        """Remember `states`, which nobody changes from here on."""
        self.held += _bytes(states) - _bytes(self._states.pop(key, []))
        self._states[key] = states
        while self.held > self.limit:
            self.held -= _bytes(self._states.popitem(last=False)[1])

    def clear(self) -> None:
        """Forget everything."""
        self._states.clear()
        self.held = 0


def _bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(map(_bytes, state)) if isinstance(state, (list, tuple)) else 0
