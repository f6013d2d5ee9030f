"""Values of the chart: what is not known is refused, and everything known is described."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.charts import CASES, CHART, needs_helm, refused

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
#: Kubernetes' own objects, which only the cluster knows in full.
OPEN = {("affinity", "nodeAffinity"), ("affinity", "podAffinity"), ("affinity", "podAntiAffinity")}


def objects(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict]]:
    """Every schema of an object, with the names that lead to it."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path, schema
        for name, inner in schema.items():
            deeper = path if name in ("properties", "definitions", "items") else (*path, name)
            yield from objects(inner, deeper)


def test_no_object_takes_names_that_are_not_listed() -> None:
    found = list(objects(SCHEMA))
    assert len(found) > 40, "the check looks at nothing"
    for path, schema in found:
        if path in OPEN:
            continue
        more = schema.get("additionalProperties")
        assert more is False or isinstance(more, dict), path


def resolved(schema: dict) -> dict:
    return SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def test_values_and_schema_name_the_same() -> None:
    """A value without a description, or described and not there, would be found by nobody."""

    def compare(values: dict, schema: dict, path: str) -> int:
        schema, count = resolved(schema), 0
        if "properties" not in schema or not values:  # of names that users choose
            return 0
        known = set(schema["properties"]) - ({"global"} if not path else set())
        if path.endswith(("affinity", "matchLabels")) or "podSelector" in known:
            return 0
        assert set(values) == known, path
        for name, value in values.items():
            count += 1
            if isinstance(value, dict):
                count += compare(value, schema["properties"][name], f"{path}.{name}")
        return count

    assert compare(VALUES, SCHEMA, "") > 100


@pytest.mark.parametrize("case", CASES)
def test_files_of_values_fit_the_schema(case: str) -> None:
    values = VALUES if not case else yaml.safe_load((CHART / "values" / case).read_text())
    jsonschema.validate(values, SCHEMA)


def paths(values: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, value in values.items():
        if isinstance(value, dict):
            yield from paths(value, (*path, name))


@pytest.mark.parametrize("path", [path for path in paths(VALUES) if path], ids=".".join)
def test_an_unknown_value_is_refused_everywhere(path: tuple[str, ...]) -> None:
    """A number where names are free would be as wrong as a name where they are not."""
    wrong: Any = {"nonsense": {"even": "deeper"}}
    for name in reversed(path):
        wrong = {name: wrong}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


@needs_helm
@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("nonsense=1", "nonsense"),
        ("worker.gpus=2", "gpus"),
        ("gateway.service.prot=80", "prot"),
        ("pools.default.worker.tp=2", "tp"),
        ("worker.pageSize=17", "pageSize"),
        ("gateway.defaultRate=0.5", "defaultRate"),
        ("images.worker.digest=latest", "digest"),
        ("worker.env.HF_TOKEN=hf_x", "HF_TOKEN"),
        ("gateway.env.SGL_KVC_API_KEY=x", "SGL_KVC_API_KEY"),
    ],
)
def test_helm_refuses_them_by_name(option: str, named: str) -> None:
    assert named in refused("", "--set", option)


@needs_helm
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["worker.enabled=false"], "has no workers"),
        (["worker.nodes=2"], "needs worker.kind: LeaderWorkerSet"),
        (["worker.kind=LeaderWorkerSet"], "for worker.nodes of 2 or more"),
        (["worker.tensorParallel=2"], "must be worker.gpu.count times worker.nodes"),
        (["worker.kind=LeaderWorkerSet", "worker.nodes=2", "worker.tensorParallel=2",
          "worker.modelCache.create=true"], "makes no claims"),
        (["inferencePool.enabled=true"], "endpointPicker.name"),
        (["ingress.enabled=true", "ingress.hosts[0].host=a", "ingress.hosts[0].pool=long"],
         "there is no pool long"),
        (["httpRoute.enabled=true", "httpRoute.rules[0].pool=long"], "there is no pool long"),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other_are_refused(options: list[str], told: str) -> None:
    assert told in refused("", *(word for option in options for word in ("--set", option)))
