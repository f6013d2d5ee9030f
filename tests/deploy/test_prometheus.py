"""Prometheus scrapes a gateway and a worker as in the chart, and every query finds something.

A query that matches nothing fails nobody: the panel stays empty, the alert silent, and the
autoscaler at its least.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import yaml
from kvc_server.launch import reserved_port
from kvc_server.tenants import digest

from sgl_kvc.spec import WORKER_KEYS
from tests.deploy.charts import (
    CHART,
    HELM,
    NAMESPACE,
    RELEASE,
    ROOT,
    of_kind,
    rendered,
    tool,
)
from tests.gateways import Gateway, serve
from tests.server.chats import chat

pytestmark = pytest.mark.skipif(tool("prometheus") is None, reason="no prometheus on PATH")
RULES = CHART / "files" / "rules.yaml"
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ALL_RULES = [rule for group in GROUPS for rule in group["rules"]]
BOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())
KEY = "operator's key"
SELECTOR = re.compile(r"\b(?:kvc_\w+|sglang:\w+|up)\b(?:\{[^}]*\})?")
#: They find something only once requests failed, or were refused; here none is.
NEVER_YET = re.compile(r'status=~?"')


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, query: str) -> list[float]:
        """The values that a query finds now."""
        told = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=30).json()
        assert told["status"] == "success", told
        return [float(each["value"][1]) for each in told["data"]["result"]]

    def found(self, query: str) -> bool:
        """Whether it finds a number."""
        return any(not math.isnan(value) for value in self.ask(query))


@pytest.fixture(scope="module")
def front(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with keys in front of a worker that it did not start, as in the chart."""
    folder = tmp_path_factory.mktemp("front")
    entry = {"name": "operator", "sha256": digest(KEY), "operator": True}
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"keys": [entry]}))
    secret = {WORKER_KEYS["api_key"]: gateway.worker_headers()["Authorization"].split()[1]}
    words = ("--worker-url", gateway.worker_url(), "--keys", str(keys))
    with serve(folder / "log", *words, **secret) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def prometheus(
    gateway: Gateway, front: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Prometheus with our rules, scraping both every second, after some requests."""
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(gateway, front)))
    (folder / "key").write_text(KEY)
    with reserved_port() as port:
        command = [
            str(tool("prometheus")), f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]  # fmt: skip
        with subprocess.Popen(command, cwd=folder) as process:
            try:
                running = Prometheus(f"http://127.0.0.1:{port}")
                load(front)
                wait(lambda: running.found("kvc_gateway_requests_per_second > 0"), front)
                for _ in range(3):
                    load(front)
                    time.sleep(1.5)
                yield running
            finally:
                process.terminate()


def configuration(gateway: Gateway, front: Gateway) -> dict:
    """That of compose, with what differs here, and with the labels that the operator sets."""
    told = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    told["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    told["rule_files"] = [str(RULES)]
    for job in told["scrape_configs"]:
        part = job["job_name"].rpartition("-")[2]
        server = front.url if part == "gateway" else gateway.worker_url()
        labels = {"namespace": NAMESPACE, "service": f"{RELEASE}-sgl-kvc-{part}",
                  "pod": f"{part}-0", "container": part, "endpoint": "http"}  # fmt: skip
        job["static_configs"] = [{"targets": [server.removeprefix("http://")], "labels": labels}]
        job["honor_labels"] = True
        if part == "gateway":
            job["authorization"] = {"credentials_file": "key"}
    return told


def load(front: Gateway) -> None:
    """Requests of every kind that a panel is about."""
    url, headers = f"{front.url}/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}
    for body in (
        chat(kv_compression={"rate": 8}),
        chat(stream=True, kv_compression={"rate": 4}),
        chat("hello ?", kv_compression={"rate": 8}),
    ):
        assert httpx.post(url, json=body, headers=headers, timeout=240).status_code == 200


def wait(condition: Callable[[], bool], front: Gateway, within_s: float = 240) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, "Prometheus tells nothing of the load"
        time.sleep(1)
        load(front)


def test_both_are_scraped(prometheus: Prometheus) -> None:
    assert prometheus.ask("sum by (job) (up)") == [1.0, 1.0]


def test_the_workers_metrics_count_once(prometheus: Prometheus) -> None:
    """The gateway hands on the worker's metrics too."""
    for name in ("sglang:num_queue_reqs", "sglang:token_usage", "kvc_compactions_total"):
        assert len(prometheus.ask(name)) == 1, name
    assert len(prometheus.ask('kvc_pool_blocks{kind="free"}')) == 1
    assert len(prometheus.ask("kvc_worker_up")) == 1


def test_our_labels_are_not_renamed(prometheus: Prometheus) -> None:
    assert prometheus.found('kvc_requests_total{endpoint="/v1/chat/completions"}')
    assert not prometheus.ask('{exported_endpoint!=""}')


@pytest.mark.parametrize("rule", [rule for rule in ALL_RULES if "record" in rule],
                         ids=lambda rule: rule["record"])  # fmt: skip
def test_every_recorded_series_is_there(prometheus: Prometheus, rule: dict) -> None:
    assert prometheus.found(rule["record"])


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.get("alert", rule.get("record")))
def test_rules_look_at_what_there_is(prometheus: Prometheus, rule: dict) -> None:
    asked = [found for found in SELECTOR.findall(rule["expr"]) if not NEVER_YET.search(found)]
    assert asked
    for selector in asked:
        assert prometheus.ask(selector), selector


def test_no_alert_fires(prometheus: Prometheus) -> None:
    assert prometheus.ask('ALERTS{alertstate="firing"}') == []


QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("query", QUERIES)
def test_every_panel_shows_something(prometheus: Prometheus, query: str) -> None:
    assert prometheus.found(query.replace("$__rate_interval", "10m"))


@pytest.mark.skipif(HELM is None, reason="no helm: make deploy-tools")
def test_the_autoscaler_asks_for_what_there_is(prometheus: Prometheus) -> None:
    sets = ("--set", "autoscaling.enabled=true")
    (scaled,) = of_kind(rendered("", *sets), "ScaledObject")
    triggers = scaled["spec"]["triggers"]
    assert [trigger["name"] for trigger in triggers] == ["queue", "occupancy", "prefill-peak"]
    for trigger in triggers:
        told = trigger["metadata"]
        assert len(prometheus.ask(told["query"])) == 1, told["query"]
        assert told["ignoreNullValues"] == "false"
        elsewhere = told["query"].replace(f'"{NAMESPACE}"', '"elsewhere"')
        assert not prometheus.ask(elsewhere), "the query does not look at its release alone"
    sets = (*sets, "--set", "autoscaling.kind=HPA")
    (scaled,) = of_kind(rendered("", *sets), "HorizontalPodAutoscaler")
    for metric in scaled["spec"]["metrics"]:
        name = metric["pods"]["metric"]["name"]
        assert prometheus.found(f'{name}{{namespace="{NAMESPACE}", pod!=""}}'), name
