"""What the chart's containers run is understood by the programs, and their probes are answered."""

from __future__ import annotations

import argparse
import asyncio
import json

import httpx
import pytest
from kvc_server.cli import build_parser
from kvc_server.cluster import ROUTERS
from kvc_server.serve import settings_of

from tests.deploy.charts import (
    CASES,
    Manifest,
    all_pods,
    argument,
    container,
    needs_helm,
    paths,
    rendered,
)
from tests.gateways import Gateway
from tests.server.stub_worker import StubWorker, play

pytestmark = needs_helm


def test_gateways_take_their_arguments(manifests: tuple[Manifest, ...]) -> None:
    for part, pod in all_pods(manifests):
        if part == "gateway":
            only = container(pod)
            assert only["command"] == ["python", "-m", "kvc_server.cli"]
            options = build_parser().parse_args(only["args"])
            settings = settings_of(options, ())
            assert settings.worker_url == argument(only["args"], "worker-url")
            if settings.keys is not None:
                mounts = [mount["mountPath"] for mount in only["volumeMounts"]]
                assert settings.keys.rpartition("/")[0] in mounts


def test_every_value_of_the_gateway_arrives() -> None:
    sets = {
        "defaultRate": 3.5, "maxRate": 99, "maxInFlight": 1000000, "drainSeconds": 77, "port": 8123,
        "policies": ["kv-compress", "knorm+uniform"], "keys": {"existingSecret": "a"},
        "corsOrigins": ["https://app.example"], "accessLog": True,
        "workerUrl": "http://elsewhere:1", "extraArgs": ["--max-window=64"],
    }  # fmt: skip
    words = ("--set-json", f"gateway={json.dumps(sets)}")
    ((_, pod),) = [each for each in all_pods(rendered("", *words)) if each[0] == "gateway"]
    options = build_parser().parse_args(container(pod)["args"])
    settings = settings_of(options, ())
    assert (settings.default_rate, settings.max_rate, settings.keys) == (
        3.5, 99, "/etc/sgl-kvc/keys/keys.json",
    )  # fmt: skip
    assert (settings.limits.max_in_flight, settings.limits.drain_timeout) == (1000000, 77)
    assert settings.knob_limits.policies == {"kv-compress", "knorm+uniform"}
    assert settings.knob_limits.max_window == 64
    assert settings.cors_origins == ("https://app.example",)
    assert (settings.worker_url, settings.access_log) == ("http://elsewhere:1", "-")
    assert options.port == container(pod)["ports"][0]["containerPort"] == 8123


def test_sglang_takes_the_workers_arguments() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    seen = 0
    for case in CASES:
        for part, pod in all_pods(rendered(case)):
            if part != "worker":
                continue
            variables = {"$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1"}
            words = container(pod)["args"]
            for variable, value in variables.items():
                words = [word.replace(variable, value) for word in words]
            words = [word for word in words if word != "--attention-backend=kvc"]  # the plugin's
            words = [word for word in words if word != "--radix-cache-backend=kvc"]
            told = parser.parse_args(words)
            assert (told.enable_metrics, told.enable_cache_report) == (True, True)
            assert told.nnodes == (2 if "multi-node" in case else 1)
            seen += 1
    assert seen > len(CASES)


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_take_their_arguments(name: str) -> None:
    router = pytest.importorskip(ROUTERS[name])
    ((_, pod),) = [each for each in all_pods(rendered("router.yaml")) if each[0] == "router"]
    told = router.parse_router_args(container(pod)["args"])
    ports = {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
    assert (told.port, told.prometheus_port) == (ports["http"], ports["metrics"])
    assert (told.service_discovery, told.service_discovery_namespace) == (True, "llm")
    assert told.selector["app.kubernetes.io/component"] == "worker"
    assert told.api_key == "$(SGL_KVC_API_KEY)"


def test_a_gateway_answers_its_probes() -> None:
    asked = paths("gateway")
    assert asked == {"/live", "/readiness"}

    async def scenario(worker: StubWorker, client: httpx.AsyncClient) -> None:
        for path in asked:
            while (await client.get(path)).status_code == 503:  # the worker was not asked yet
                await asyncio.sleep(0.01)
            assert (await client.get(path)).status_code == 200
        (nobody,) = {(await client.get(f"{path}nonsense")).status_code for path in asked}
        assert nobody == 404

    play(scenario)


@pytest.mark.parametrize("path", ["/health"])
def test_a_worker_answers_its_probes_without_a_key(gateway: Gateway, path: str) -> None:
    assert paths("worker") == {path}
    url = gateway.worker_url()
    assert httpx.get(f"{url}/v1/models", timeout=30).status_code == 401
    assert httpx.get(f"{url}{path}", timeout=30).status_code == 200
    assert httpx.get(f"{url}/metrics/", timeout=30).status_code == 200
