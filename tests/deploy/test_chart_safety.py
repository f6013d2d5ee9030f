"""Pods of the chart: how they stop, what they may do, and that no secret is told."""

from __future__ import annotations

import re
from pathlib import Path

from tests.deploy.charts import (
    PROBES,
    Manifest,
    all_pods,
    argument,
    container,
    needs_helm,
    of_kind,
)

pytestmark = needs_helm
SECRET = re.compile(r"(?i)token|secret|passw|api_?key|credential")


def test_a_stop_waits_longer_than_the_drain(manifests: tuple[Manifest, ...]) -> None:
    drain = {"gateway": None, "worker": 120, "router": 60}
    for part, pod in all_pods(manifests):
        only, grace = container(pod), pod["spec"]["terminationGracePeriodSeconds"]
        (sleep, pre_stop) = only["lifecycle"]["preStop"]["exec"]["command"]
        assert sleep == "sleep"
        assert int(pre_stop) >= 5, "endpoints take some seconds to change"
        if part == "gateway":
            drain[part] = int(argument(only["args"], "drain-timeout"))
        assert grace >= int(pre_stop) + min(30, drain[part]) + 15
        if part == "gateway":
            assert grace >= int(pre_stop) + drain[part] + 15


def test_nobody_may_more_than_needed(manifests: tuple[Manifest, ...]) -> None:
    for part, pod in all_pods(manifests):
        spec, only = pod["spec"], container(pod)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] >= 10000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False, "privileged": False, "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        assert spec["automountServiceAccountToken"] is (part == "router")
        assert only["resources"]["limits"]["memory"]
        assert only["resources"]["requests"]["cpu"]
    for role in of_kind(manifests, "Role"):
        assert all(set(rule["verbs"]) <= {"get", "list", "watch"} for rule in role["rules"])


def test_what_is_written_has_a_volume(manifests: tuple[Manifest, ...]) -> None:
    """The root file system is read-only."""
    for part, pod in all_pods(manifests):
        only = container(pod)
        mounts = {mount["name"]: mount["mountPath"] for mount in only["volumeMounts"]}
        env = {each["name"]: each.get("value", "") for each in only["env"]}
        for name in ("TMPDIR", *(("HOME", "HF_HOME", "SGL_KVC_CACHE") if part == "worker" else ())):
            assert any(Path(env[name]).is_relative_to(path) for path in mounts.values()), name
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        claimed = {
            claim["metadata"]["name"]
            for each in of_kind(manifests, "StatefulSet")
            for claim in each["spec"].get("volumeClaimTemplates", ())
        }
        assert set(mounts) <= volumes | claimed


def test_no_secret_is_in_plain_text(manifests: tuple[Manifest, ...]) -> None:
    assert not of_kind(manifests, "Secret")
    seen = 0
    for _, pod in all_pods(manifests):
        for each in container(pod)["env"]:
            if SECRET.search(each["name"]):
                seen += 1
                assert "value" not in each
                assert each["valueFrom"]["secretKeyRef"]["name"]
        for word in container(pod)["args"]:
            name, _, value = word.partition("=")
            if re.search("api-key|password|secret|hf-token", name):
                assert value == "$(SGL_KVC_API_KEY)"
    assert seen or "workerKeys" not in str(manifests)


def test_health_that_takes_a_second_has_the_time(manifests: tuple[Manifest, ...]) -> None:
    """SGLang's /health waits a second before it looks, and Kubernetes' default is one second."""
    for part, pod in all_pods(manifests):
        only = container(pod)
        probes = [only[name] for name in PROBES if name in only]
        follower = pod["metadata"]["labels"].get("sgl-kvc/role") == "follower"
        assert len(probes) == (0 if follower else 3)
        if part == "worker" and probes:
            assert all(probe["timeoutSeconds"] > 20 for probe in probes)
            dies = only["livenessProbe"]
            assert dies["failureThreshold"] * dies["periodSeconds"] >= 120
