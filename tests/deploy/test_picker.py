"""What an endpoint picker reads of a worker, by the options of docs/operating.md."""

from __future__ import annotations

import re
import threading

import httpx

from tests.deploy.charts import ROOT
from tests.gateways import Gateway

OPTIONS = dict(
    re.findall(r"^    --([\w-]+)-metric=(\S+)$", (ROOT / "docs" / "operating.md").read_text(), re.M)
)
WORDS = ["the", "old", "river", "waits", "near", "the", "quiet", "village", "."] * 90


def metrics(worker: str) -> dict[str, float]:
    """What a worker tells without a key, by name."""
    text = httpx.get(f"{worker}/metrics/", headers={"Accept": "text/plain"}, timeout=120).text
    found = re.findall(r"^([\w:]+)(?:\{.*\})? ([\d.e+-]+)$", text, re.M)
    return {name: float(value) for name, value in found}


def usage(gateway: Gateway, first: int, rate: float) -> float:
    """What is told to be in use at last, while four prompts that share nothing are answered."""
    body = {
        "text": [" ".join(WORDS[begin:]) for begin in range(first, first + 4)],
        "sampling_params": {"max_new_tokens": 320, "ignore_eos": True},
        "kv_compression": {"rate": rate},
    }

    def ask() -> None:
        answer = httpx.post(f"{gateway.url}/generate", json=body, timeout=300)
        assert answer.status_code == 200, answer.text

    asking, told = threading.Thread(target=ask), [0.0]
    asking.start()
    while asking.is_alive():
        now = metrics(gateway.worker_url())
        if now[OPTIONS["total-running-requests"]] == 4:
            told.append(now[OPTIONS["kv-cache-usage-percentage"]])
    asking.join()
    return told[-1]


def test_every_metric_that_a_picker_asks_for_is_there(gateway: Gateway) -> None:
    assert set(OPTIONS) == {
        "total-queued-requests", "total-running-requests", "kv-cache-usage-percentage",
    }  # fmt: skip
    assert set(OPTIONS.values()) <= set(metrics(gateway.worker_url()))


def test_what_compression_gave_back_counts_as_free(gateway: Gateway) -> None:
    whole, compressed = usage(gateway, 0, 1), usage(gateway, 4, 8)
    assert whole > 0.15
    assert 0 < compressed < whole / 2
