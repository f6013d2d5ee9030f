"""An LRU cache of scorer state, keyed by prompt."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)

#: Of the KV pool's bytes: what all states together may take, and what a small pool allows anyway.
_SHARE, _MIN_LIMIT = 0.02, 8 << 20


class StateCache:
    """States of all layers by prompt and method, the least recently used forgotten first.

    A scorer with ``observe`` needs every query of a prompt, so a prompt that it has not seen
    cannot be taken from the prefix cache. One that it has seen can.

    Parameters
    ----------
    limit : bytes of tensors that are held.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.held = 0
        self._states: OrderedDict[Hashable, list[Any]] = OrderedDict()

    @classmethod
    def for_pool(cls, pool_bytes: int) -> StateCache:
        """One whose limit follows from the KV pool's size, hence from the model's and the GPU's."""
        return cls(max(_MIN_LIMIT, int(_SHARE * pool_bytes)))

    def get(self, key: Hashable) -> list[Any] | None:
        """The states of all layers, None if they are not known."""
        states = self._states.get(key)
        if states is not None:
            self._states.move_to_end(key)
        return states

    def put(self, key: Hashable, states: list[Any]) -> None:
        """Remember `states`, which nobody changes from here on.

        States that alone exceed the limit, or hold what cannot be measured, are not remembered.
        """
        try:
            size = state_bytes(states)
        except TypeError as error:
            logger.warning("a scorer's states are not remembered: %s", error)
            return
        self._drop(key)
        if size > self.limit:
            return
        self._states[key] = states
        self.held += size
        while self.held > self.limit:
            self._drop(next(iter(self._states)))

    def clear(self) -> None:
        """Forget everything."""
        self._states.clear()
        self.held = 0

    def _drop(self, key: Hashable) -> None:
        if key in self._states:
            self.held -= state_bytes(self._states.pop(key))


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a scorer's state: tensors, numbers and containers of these.

    Raises
    ------
    TypeError : for anything else, which could hold memory that nobody counts.
    """
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if state is None or isinstance(state, (bool, int, float, str)):
        return 0
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return sum(state_bytes(getattr(state, each.name)) for each in dataclasses.fields(state))
    if isinstance(state, (list, tuple)):
        return sum(map(state_bytes, state))
    if isinstance(state, Mapping):
        return sum(map(state_bytes, state.values()))
    raise TypeError(f"a state of type {type(state).__name__}; tensors and dataclasses are counted")
