"""What the chart renders is what Kubernetes knows, fits together, and is safe to run."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
import yaml

from tests.deploy.charts import (
    CASES,
    CHART,
    NAMESPACE,
    PROBES,
    ROOT,
    WORKLOADS,
    Manifest,
    all_pods,
    argument,
    component,
    container,
    helm,
    name_of,
    needs_helm,
    of_kind,
    pods,
    rendered,
    selected,
    tools_module,
)

pytestmark = needs_helm
KUBERNETES = "1.33.0"
#: Kinds that are none of Kubernetes' own, by the API they are of.
CUSTOM = {
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1", "HTTPRoute": "gateway.networking.k8s.io/v1",
    "InferencePool": "inference.networking.k8s.io/v1", "ScaledObject": "keda.sh/v1alpha1",
    "ServiceMonitor": "monitoring.coreos.com/v1", "PrometheusRule": "monitoring.coreos.com/v1",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing(case: str) -> None:
    values = ["--values", str(CHART / "values" / case)] if case else []
    done = helm("lint", "--strict", str(CHART), *values)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[ERROR]" not in done.stdout
    assert "[WARNING]" not in done.stdout


def test_the_cases_have_every_kind() -> None:
    kinds = {each["kind"] for case in CASES for each in rendered(case)}
    assert kinds == {
        *CUSTOM, "Deployment", "StatefulSet", "Service", "ServiceAccount", "Role", "RoleBinding",
        "NetworkPolicy", "PodDisruptionBudget", "Ingress", "HorizontalPodAutoscaler", "ConfigMap",
    }  # fmt: skip


def test_kubernetes_knows_them(manifests: tuple[Manifest, ...]) -> None:
    validate = tools_module("kubernetes_validate").validate
    for each in manifests:
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"]
        if each["kind"] in CUSTOM:
            assert each["apiVersion"] == CUSTOM[each["kind"]]
        else:
            validate(each, KUBERNETES, strict=True)
        if each["kind"] == "LeaderWorkerSet":  # its pods are Kubernetes' own all the same
            for index, pod in enumerate(pods(each)):
                body = {"apiVersion": "v1", "kind": "Pod", **pod}
                body["metadata"] = {"name": f"pod-{index}", **pod["metadata"]}
                validate(body, KUBERNETES, strict=True)


def test_names_are_their_own(manifests: tuple[Manifest, ...]) -> None:
    names = [(each["kind"], name_of(each)) for each in manifests]
    assert len(names) == len(set(names))
    assert all(len(name) <= 52 for _, name in names)  # what a StatefulSet adds has to fit too


def test_every_selector_finds_one_workload(manifests: tuple[Manifest, ...]) -> None:
    looked = 0
    for each in manifests:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            labels = spec["selector"]
        elif each["kind"] == "NetworkPolicy":
            labels = spec["podSelector"]["matchLabels"]
        elif each["kind"] in (*WORKLOADS, "PodDisruptionBudget", "InferencePool"):
            if "selector" not in spec:  # a LeaderWorkerSet labels its pods itself
                continue
            labels = spec["selector"]["matchLabels"]
        else:
            continue
        looked += 1
        found = selected(manifests, labels)
        assert len(found) == 1, (each["kind"], name_of(each), found)
        (workload,) = found
        assert name_of(each) in (workload, f"{workload}-nodes")
    assert looked >= 7


def test_every_port_leads_to_a_container(manifests: tuple[Manifest, ...]) -> None:
    for service in of_kind(manifests, "Service"):
        (workload,) = selected(manifests, service["spec"]["selector"])
        (found,) = [each for each in of_kind(manifests, *WORKLOADS) if name_of(each) == workload]
        names = {port["name"] for pod in pods(found) for port in container(pod)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for _, pod in all_pods(manifests):
        only = container(pod)
        ports = {port["name"]: port["containerPort"] for port in only["ports"]}
        assert int(argument(only["args"], "port")) == ports["http"]
        for probe in PROBES:
            assert probe not in only or only[probe]["httpGet"]["port"] in ports


def test_requests_find_their_way(manifests: tuple[Manifest, ...]) -> None:
    """Ingress and route to a gateway, gateway to router or worker of its own pool."""
    services = {name_of(each): each["spec"]["ports"] for each in of_kind(manifests, "Service")}
    for ingress in of_kind(manifests, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                target = path["backend"]["service"]
                assert target["port"]["name"] in {p["name"] for p in services[target["name"]]}
                assert "-gateway" in target["name"]
    for route in of_kind(manifests, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for target in rule["backendRefs"]:
                assert target["port"] in {port["port"] for port in services[target["name"]]}
                assert "-gateway" in target["name"]
    routed = "router" in {part for part, _ in all_pods(manifests)}
    for part, pod in all_pods(manifests):
        if part == "gateway":
            url = urlsplit(argument(container(pod)["args"], "worker-url"))
            assert url.hostname is not None
            assert url.port in {port["port"] for port in services[url.hostname]}
            wanted = "-router" if routed else "-worker"
            pool = pod["metadata"]["labels"]["sgl-kvc/pool"]
            assert url.hostname.endswith(wanted + ("" if pool == "default" else f"-{pool}"))


def test_the_router_looks_for_workers_that_there_are(manifests: tuple[Manifest, ...]) -> None:
    for part, pod in all_pods(manifests):
        if part != "router":
            continue
        words = container(pod)["args"]
        begin = words.index("--selector") + 1
        labels = dict(word.split("=") for word in words[begin : begin + 4])
        (found,) = selected(manifests, labels)
        (workload,) = [each for each in of_kind(manifests, *WORKLOADS) if name_of(each) == found]
        assert component(workload) == "worker"
        port = container(pods(workload)[0])["ports"][0]["containerPort"]
        assert argument(words, "service-discovery-port") == str(port)
        assert argument(words, "service-discovery-namespace") == NAMESPACE


def test_only_gateway_router_and_prometheus_reach_workers(manifests: tuple[Manifest, ...]) -> None:
    for policy in of_kind(manifests, "NetworkPolicy"):
        if component(policy) != "worker":
            continue
        for rule in policy["spec"]["ingress"]:
            for peer in rule["from"]:  # without it everybody would
                assert peer, "an empty peer is everybody"
                labels = peer.get("podSelector", {}).get("matchLabels", {})
                part = labels.get("app.kubernetes.io/component")
                allowed = part in ("gateway", "router", "worker") or "app" in labels
                assert allowed or "namespaceSelector" in peer
                assert part != "worker" or "ports" not in rule
                if part is not None:
                    assert selected(manifests, labels)


def test_prometheus_finds_each_workload_once(manifests: tuple[Manifest, ...]) -> None:
    monitors = of_kind(manifests, "ServiceMonitor")
    for monitor in monitors:
        labels = monitor["spec"]["selector"]["matchLabels"]
        found = [
            each for each in of_kind(manifests, "Service")
            if labels.items() <= each["metadata"]["labels"].items()
        ]  # fmt: skip
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["honorLabels"], "or our label `endpoint` is renamed"
        workloads = [selected(manifests, each["spec"]["selector"]) for each in found]
        assert workloads
        assert len(workloads) == len({name for (name,) in workloads}), "scraped twice"
        for each in found:
            assert endpoint["port"] in {port["name"] for port in each["spec"]["ports"]}
            assert monitor["spec"]["jobLabel"] in each["metadata"]["labels"]
    if monitors:
        parts = {part for part, _ in all_pods(manifests)}
        assert {name_of(monitor).rpartition("-")[2] for monitor in monitors} == parts


def test_compose_scrapes_as_the_chart_does() -> None:
    scrapes = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    ours = {each["job_name"]: each for each in scrapes["scrape_configs"]}
    for monitor in of_kind(rendered("two-pools.yaml"), "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        job = ours[monitor["spec"]["selector"]["matchLabels"]["sgl-kvc/job"]]
        theirs = [
            {name.replace("Label", "_label"): value for name, value in rule.items()}
            for rule in endpoint.get("metricRelabelings", [])
        ]
        assert job.get("metric_relabel_configs", []) == theirs


def test_one_file_of_rules_and_one_dashboard() -> None:
    manifests = rendered("two-pools.yaml")
    (rules,) = of_kind(manifests, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    (board,) = of_kind(manifests, "ConfigMap")
    text = (ROOT / "docs" / "grafana.json").read_text()
    assert board["data"]["sgl-kvc.json"].strip() == text.strip()


def test_pools_are_apart() -> None:
    manifests = rendered("two-pools.yaml")
    workers = {name_of(each): container(pods(each)[0])["args"]
               for each in of_kind(manifests, "StatefulSet")}  # fmt: skip
    lengths = {name: argument(words, "context-length") for name, words in workers.items()}
    assert lengths == {"kvc-sgl-kvc-worker": "8192", "kvc-sgl-kvc-worker-long": "32768"}
    scaled = {each["spec"]["scaleTargetRef"]["name"]: each["spec"]["maxReplicaCount"]
              for each in of_kind(manifests, "ScaledObject")}  # fmt: skip
    assert scaled == {"kvc-sgl-kvc-worker": 8, "kvc-sgl-kvc-worker-long": 4}
    (route,) = of_kind(manifests, "HTTPRoute")
    first, second = route["spec"]["rules"]
    assert first["matches"][0]["headers"] == [{"type": "Exact", "name": "x-pool", "value": "long"}]
    assert "headers" not in second["matches"][0]
