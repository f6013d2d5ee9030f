"""The suites by name; each is imported only when it is asked for."""

from __future__ import annotations

import importlib

SUITES = {
    "recall": "kvc_eval.suites.recall",
    "chats": "kvc_eval.suites.chats",
    "ruler": "kvc_eval.suites.ruler",
    "text": "kvc_eval.suites.text",
    "longbench": "kvc_eval.suites.longbench",
}


def load(name: str) -> type:
    """The class of a suite. Raises ImportError when a package that it needs is not there."""
    return importlib.import_module(SUITES[name]).SUITE
