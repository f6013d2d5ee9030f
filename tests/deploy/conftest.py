"""Every test that takes `manifests` looks at all that the chart renders, case by case."""

from __future__ import annotations

import pytest

from tests.deploy.charts import CASES, Manifest, rendered


@pytest.fixture(params=CASES, ids=lambda case: case or "values.yaml")
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return rendered(request.param)
