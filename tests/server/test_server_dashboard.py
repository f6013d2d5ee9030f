"""The Grafana dashboard asks for metrics that there are, with labels that they have."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateways import Gateway
from tests.server.chats import chat
from tests.server.test_server_metrics import eventually

BOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
QUERIES = {
    f"{panel['title']}: {target['expr']}": target
    for panel in BOARD["panels"]
    for target in panel["targets"]
}
METRIC = re.compile(r"\b(?:kvc_|sglang:)\w+")


@pytest.fixture(scope="module")
def scraped(gateway: Gateway) -> dict[str, set[str]]:
    """Of every metric of a gateway that has served: the labels of its samples."""
    url = f"{gateway.url}/v1/chat/completions"
    for more in ({"stream": True}, {"kv_compression": {"rate": 8}}):
        assert httpx.post(url, json=chat(**more), timeout=180).status_code == 200
    short = chat("hello ?", kv_compression={"rate": 8})
    assert httpx.post(url, json=short, timeout=180).status_code == 200
    text = httpx.get(f"{gateway.url}/metrics", timeout=120).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        suffix = "_total" if family.type == "counter" else ""
        found.setdefault(family.name + suffix, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_panel_asks_something() -> None:
    assert len(BOARD["panels"]) >= 12
    assert all(panel["targets"] for panel in BOARD["panels"])


@pytest.mark.parametrize("query", QUERIES)
def test_what_is_asked_for_is_there(scraped: dict[str, set[str]], query: str) -> None:
    target = QUERIES[query]
    names = METRIC.findall(target["expr"])
    assert names
    for name in names:
        known = scraped.get(name, scraped.get(name.removesuffix("_bucket")))
        assert known is not None, f"{name} is not scraped"
        grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
        shown = re.findall(r"{{(\w+)}}", target["legendFormat"])
        asked = {label.strip() for group in grouped for label in group.split(",")} | {*shown}
        if name.startswith(("kvc_tenant_", "kvc_tokens", "kvc_broken")):
            continue  # no sample of them here: this gateway has no keys, and broke no stream
        assert asked <= known, f"{name} has {known}"


def test_the_pools_blocks_add_up(gateway: Gateway) -> None:
    """Also while a compressed prompt's segment lies beside the tree."""

    def blocks() -> dict[str, float]:
        text = httpx.get(f"{gateway.url}/metrics", timeout=120).text
        return {
            sample.labels["kind"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "kvc_pool_blocks"
        }

    seen: list[dict[str, float]] = []
    body = chat(kv_compression={"rate": 8}, stream=True, max_tokens=2000, ignore_eos=True)
    url = f"{gateway.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=180) as answer:
        parts = answer.iter_raw()
        begin = time.monotonic()
        while not seen or not seen[-1]["segment"]:
            assert time.monotonic() < begin + 20
            next(parts)
            seen.append(blocks())
    assert eventually(lambda: blocks()["segment"] == 0, within=60)
    seen.append(blocks())
    for each in seen:
        assert set(each) == {"tree", "segment", "tail", "free"}
        assert sum(each.values()) == 16384 / 16
    assert seen[-2]["segment"] == 4, "31 blocks at rate 8"
    assert seen[-1]["tail"] == 0
