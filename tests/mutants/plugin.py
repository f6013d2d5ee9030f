"""pytest for mutants: the fastest tests first, and few examples of each property, the same always.

The first test that fails ends a mutant, so most never reach the slow ones. Every mutant is a fork
of a process that has imported torch, SGLang and the tests; collecting garbage there would copy all
of their objects, at ten times the cost of a test.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "mutants",
    derandomize=True,
    max_examples=25,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
gc.disable()


def pytest_configure() -> None:
    """Behind `conftest.py`, which has loaded a profile of its own."""
    settings.load_profile("mutants")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by the seconds that each took when mutmut ran them all."""
    known = Path("mutants/mutmut-stats.json")
    known = known if known.exists() else Path("mutmut-stats.json")  # it runs in `mutants`
    if known.exists():
        seconds = json.loads(known.read_text())["duration_by_test"]
        items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))
