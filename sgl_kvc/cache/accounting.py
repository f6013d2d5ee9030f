"""How many compactions there were, and how long they took: for metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Compactions:
    """Compactions since they were last taken: how many, and their seconds.

    Attributes
    ----------
    total : of all times.
    """

    def __init__(self) -> None:
        self._count, self._seconds, self.total = 0, 0.0, 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count what runs inside as one."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._count += 1
            self.total += 1
            self._seconds += time.perf_counter() - begin

    def take(self) -> tuple[int, float]:
        """How many and how long, and begin anew."""
        taken = self._count, self._seconds
        self._count, self._seconds = 0, 0.0
        return taken
