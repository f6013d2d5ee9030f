"""RULER-style tasks (arXiv 2404.06654) in English, for real models. A generator a file or a few.

The wording and the filler are our own; what is hidden, how often, and the score (share of the
expected strings that the answer contains) are the paper's unless a generator says otherwise.
"""

from __future__ import annotations

from kvc_eval.suites.ruler import copying, frequency, needles, tracking
from kvc_eval.suites.sized import Generator, Sized

GENERATORS: dict[str, Generator] = {
    "niah_single": needles.single,
    "niah_multikey": needles.multikey,
    "niah_multivalue": needles.multivalue,
    "niah_multiquery": needles.multiquery,
    "vt": tracking.variables,
    "cwe": frequency.common,
    "fwe": frequency.frequent,
    "copy": copying.copy,
}


class Ruler(Sized):
    """Prompts of about the length asked for."""

    name = "ruler"
    generators = GENERATORS


SUITE = Ruler
