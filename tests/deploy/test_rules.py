"""Prometheus' rules: known to promtool, told in the docs, and about metrics that there are."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from tests.deploy.charts import CHART, ROOT, tool

RULES = CHART / "files" / "rules.yaml"
CASES = ROOT / "deploy" / "prometheus" / "rules_test.yaml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
OPERATING = (ROOT / "docs" / "operating.md").read_text()
needs_promtool = pytest.mark.skipif(tool("promtool") is None, reason="no promtool on PATH")


def promtool(*arguments: str) -> None:
    done = subprocess.run([str(tool("promtool")), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_them() -> None:
    promtool("check", "rules", str(RULES))


@needs_promtool
def test_they_fire_when_they_should() -> None:
    promtool("test", "rules", str(CASES))


def test_the_cases_fire_every_alert() -> None:
    fired = set(re.findall(r'alertname="(\w+)"', CASES.read_text()))
    assert fired == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_the_docs_say_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (path, anchor) == ("docs/operating.md", name.lower())
    section = OPERATING.partition(f"### {name}\n")[2].partition("\n### ")[0]
    assert len(section.split()) > 15, "docs/operating.md says nothing of it"
    assert rule["labels"]["severity"] in ("critical", "warning")
