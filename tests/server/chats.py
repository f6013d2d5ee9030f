"""Requests to the gateway, and what its answers have to hold."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from kvc_recall.tasks import sample

PROMPT = sample("needles8", 512, Random(7))
RESULT_FIELDS = {
    "policy", "rate", "rate_achieved", "prompt_tokens", "kept_per_head", "blocks", "bytes",
    "skipped",
}  # fmt: skip


def chat(text: str = PROMPT.text, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "recall", "messages": messages, "max_tokens": 8, "temperature": 0} | more


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream; checks that it ends with [DONE]."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def check_report(report: dict[str, Any], rate: float) -> None:
    assert set(report) >= RESULT_FIELDS
    assert report["rate"] == rate
    assert report["prompt_tokens"] == 512
    assert report["blocks"]["before"] == 32
    assert report["skipped"] is None
    if rate == 1:
        assert report["bytes"]["after"] == report["bytes"]["before"]
    else:
        assert report["blocks"]["after"] == 32 // rate
        assert report["bytes"]["after"] * rate == report["bytes"]["before"]
