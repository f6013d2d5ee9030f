"""The chart as helm renders it, and what is needed to look into it."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "sgl-kvc"
TOOLS = ROOT / "build" / "tools"
NAMESPACE, RELEASE = "llm", "kvc"
#: Every way the chart is rendered: with its own values, and with every file of values/.
CASES = ("", *sorted(path.name for path in (CHART / "values").glob("*.yaml")))
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")

Manifest = dict[str, Any]


def tool(name: str) -> str | None:
    """A program that `make deploy-tools` fetched, else one on PATH."""
    ours = TOOLS / "bin" / name
    return str(ours) if os.access(ours, os.X_OK) else shutil.which(name)


def tools_module(name: str) -> ModuleType:
    """A module that `make deploy-tools` fetched; skips the test without."""
    if not (TOOLS / "python" / name).is_dir():
        pytest.skip(f"no {name}: make deploy-tools")
    sys.path.append(str(TOOLS / "python"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(TOOLS / "python"))


HELM = tool("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="no helm: make deploy-tools")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60)


def template(case: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`helm template` with a file of values/, or none."""
    values = ["--values", str(CHART / "values" / case)] if case else []
    return helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE,
                "--kube-version", "1.33.0", *values, *arguments)  # fmt: skip


@functools.cache
def rendered(case: str, *arguments: str) -> tuple[Manifest, ...]:
    """Every object of a case."""
    done = template(case, *arguments)
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.safe_load_all(done.stdout) if each)


def refused(case: str, *arguments: str) -> str:
    """What helm says of values that it does not take."""
    done = template(case, *arguments)
    assert done.returncode != 0, "helm took them"
    return done.stderr


def of_kind(manifests: tuple[Manifest, ...], *kinds: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] in kinds]


def name_of(manifest: Manifest) -> str:
    return manifest["metadata"]["name"]


def component(manifest: Manifest) -> str:
    return manifest["metadata"]["labels"]["app.kubernetes.io/component"]


def pods(workload: Manifest) -> list[Manifest]:
    """The pod templates of a workload."""
    spec = workload["spec"]
    if workload["kind"] == "LeaderWorkerSet":
        inner = spec["leaderWorkerTemplate"]
        return [inner["leaderTemplate"], inner["workerTemplate"]]
    return [spec["template"]]


def all_pods(manifests: tuple[Manifest, ...]) -> Iterator[tuple[str, Manifest]]:
    """(component, pod template) of every workload."""
    for workload in of_kind(manifests, *WORKLOADS):
        for pod in pods(workload):
            yield component(workload), pod


def selected(manifests: tuple[Manifest, ...], labels: dict[str, str]) -> set[str]:
    """Names of the workloads that have a pod with these labels."""
    assert labels
    return {
        name_of(workload)
        for workload in of_kind(manifests, *WORKLOADS)
        for pod in pods(workload)
        if labels.items() <= pod["metadata"]["labels"].items()
    }


def container(pod: Manifest) -> Manifest:
    (only,) = pod["spec"]["containers"]
    return only


def argument(arguments: list[str], name: str) -> str:
    """The value of ``--name=value``."""
    (found,) = [each for each in arguments if each.startswith(f"--{name}=")]
    return found.partition("=")[2]


def paths(part: str) -> set[str]:
    """What a component's probes ask for, in any case."""
    return {
        container(pod)[probe]["httpGet"]["path"]
        for case in CASES
        for which, pod in all_pods(rendered(case))
        for probe in PROBES
        if which == part and probe in container(pod)
    }
