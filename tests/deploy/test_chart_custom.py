"""Objects of other projects' kinds against those projects' own definitions (CRDs).

The definitions are not part of this repository: put the YAML files of LeaderWorkerSet, HTTPRoute,
InferencePool, ScaledObject, ServiceMonitor and PrometheusRule into a folder and name it in
SGL_KVC_CRDS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.charts import CASES, Manifest, needs_helm, rendered

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the definitions are long
FOLDER = os.environ.get("SGL_KVC_CRDS")
pytestmark = [
    needs_helm,
    pytest.mark.skipif(FOLDER is None, reason="SGL_KVC_CRDS names no folder of definitions"),
]


def definitions() -> Iterator[tuple[tuple[str, str], jsonschema.Draft7Validator]]:
    """((apiVersion, kind), its validator) of every version."""
    for path in sorted(Path(FOLDER or "").glob("*.y*ml")):
        for crd in yaml.load_all(path.read_text(), Loader=LOADER):
            for version in crd["spec"]["versions"]:
                kind = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
                schema = strict(version["schema"]["openAPIV3Schema"])
                yield kind, jsonschema.Draft7Validator(schema)


def strict(schema: Any) -> Any:
    """The schema without what it leaves out: a cluster would drop such fields silently."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(inner) for name, inner in schema.items() if name != "format"}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    keeps = made.get("x-kubernetes-preserve-unknown-fields")
    if made.get("type") == "object" and "properties" in made and not keeps:
        made.setdefault("additionalProperties", False)
        if isinstance(made["properties"], dict) and "kind" in made["properties"]:
            made["properties"].setdefault("metadata", {})
            made["properties"]["metadata"] = {}
    return made


def test_they_are_as_their_projects_define_them() -> None:
    known = dict(definitions())
    seen: set[str] = set()
    for case in CASES:
        for each in custom(case):
            validator = known[each["apiVersion"], each["kind"]]
            validator.validate(each)
            seen.add(each["kind"])
            wrong = each | {"spec": each["spec"] | {"nonsense": 1}}
            assert not validator.is_valid(wrong)
    assert len(seen) == 6


def custom(case: str) -> list[Manifest]:
    """Objects whose API has a dot that is none of Kubernetes' own."""
    own = ("apps/", "policy/", "autoscaling/", "networking.k8s.io/", "rbac.authorization.k8s.io/")
    return [
        each for each in rendered(case)
        if "/" in each["apiVersion"] and not each["apiVersion"].startswith(own)
    ]  # fmt: skip
