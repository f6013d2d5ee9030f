"""A response's reports, held against the knob that the worker was sent."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvc_server.elastic import FIELD, Elastic
from sgl_kvc.spec import CUSTOM_PARAM, ON_PRESSURE, CompressionSpec

#: What `skipped` says of a request whose knob did not arrive.
DROPPED = "the knob did not reach the worker: what stands before it dropped it"
NO_REPORT = "the worker tells nothing of compression: is sgl-kvc installed there?"


class Reports:
    """Says in reports what the worker cannot know. One object per request.

    Parameters
    ----------
    specs : the knob that was asked for, or that of each prompt.
    elastic, rate : and how far it could be raised, and was.

    Attributes
    ----------
    lost : why a knob that was sent had no effect; None if it had.
    """

    def __init__(
        self,
        specs: tuple[CompressionSpec, ...],
        elastic: Elastic | None = None,
        rate: float | None = None,
    ):
        sent = [spec if rate is None else dataclasses.replace(spec, rate=rate) for spec in specs]
        self._sent = [(spec.policy, spec.rate) for spec in sent if not spec.off]
        self._all = len(self._sent) == len(sent)
        self._elastic = None if elastic is None else elastic.report(rate)
        self._found = False
        self.lost: str | None = None

    @property
    def silent(self) -> bool:
        """Whether nothing was asked for, so that there is nothing to say."""
        return not self._sent and self._elastic is None

    @property
    def missing(self) -> bool:
        """Whether there should have been a report, and was none."""
        return bool(self._sent) and not self._found

    def amended(self, content: dict[str, Any]) -> dict[str, Any]:
        """An object that tells reports, with what is to be said; itself where that is nothing."""
        told = content[CUSTOM_PARAM]
        self._found = True
        if isinstance(told, list):
            reports: Any = [self._amended(each) for each in told]
        else:
            reports = self._amended(told)
        return content if reports == told else content | {CUSTOM_PARAM: reports}

    def none(self) -> dict[str, Any]:
        """The report of a response that has none."""
        self.lost = NO_REPORT
        return {"policy": None, "rate": 1.0, "skipped": NO_REPORT}

    def _amended(self, report: Any) -> Any:
        if not isinstance(report, dict):
            return report
        if self._elastic is not None:
            report = report | {FIELD: self._elastic}
        as_sent = (report.get("policy"), report.get("rate")) in self._sent
        as_sent |= report.get(ON_PRESSURE) is not None  # it may be, or not yet be, compressed
        off = report.get("policy") is None and not self._all
        if self._sent and not as_sent and not off and report.get("skipped") is None:
            self.lost = DROPPED
            return report | {"skipped": DROPPED}
        return report
