"""The suites by name; each is imported only when it is asked for."""

from __future__ import annotations

import importlib

SUITES = {
    "recall": "kvc_server.evaluation.suites.recall",
    "ruler": "kvc_server.evaluation.suites.ruler",
    "longbench": "kvc_server.evaluation.suites.longbench",
}


def load(name: str) -> type:
    """The class of a suite. Raises ImportError when a package that it needs is not there."""
    return importlib.import_module(SUITES[name]).SUITE
