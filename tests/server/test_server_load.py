"""Many streams at once: who leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
from kvc_server.footprint import Prompt

from sgl_kvc.spec import chained_digests, parse
from tests.gateways import Gateway

CLIENTS, LEAVING = 64, 13


def test_clients_that_vanish_leave_nothing(gateway: Gateway) -> None:
    """A fifth of 64 streams is dropped after its first part; the rest comes to its end."""
    sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    body = {"stream": True, "sampling_params": sampling, "kv_compression": {"rate": 4}}
    text = "the old river waits near the quiet village . "

    async def stream(client: httpx.AsyncClient, number: int) -> bytes | None:
        asked = body | {"text": f"{number} {text * 12}"}
        async with client.stream("POST", "/generate", json=asked) as answer:
            got = b""
            async for part in answer.aiter_raw():
                if number < LEAVING:
                    return None
                got += part
        return got

    async def all_streams() -> list[bytes | None]:
        async with gateway.async_client() as client:
            return await asyncio.gather(*(stream(client, number) for number in range(CLIENTS)))

    answers = asyncio.run(all_streams())
    assert sum(answer is None for answer in answers) == LEAVING
    for answer in answers[LEAVING:]:
        assert answer is not None
        assert answer.endswith(b"data: [DONE]\n\n")
    deadline = time.monotonic() + 5
    while (left := running(gateway)) != (0, 0):
        assert time.monotonic() < deadline, f"in flight at the gateway and in the engine: {left}"
        time.sleep(0.2)


def running(gateway: Gateway) -> tuple[int, int]:
    """Requests in flight at the gateway's ``/generate``, and those that SGLang runs or queues."""
    with gateway.client() as client:
        metrics = client.get("/metrics").text
    with httpx.Client(headers=gateway.worker_headers()) as client:
        loads = client.get(f"{gateway.worker_url()}/get_load").json()
    line = 'kvc_requests_in_flight{endpoint="/generate"} '
    (in_flight,) = (row for row in metrics.splitlines() if row.startswith(line))
    return int(float(in_flight.removeprefix(line))), sum(load["num_reqs"] for load in loads)


def test_the_prediction_is_what_the_worker_reports(gateway: Gateway) -> None:
    text = "the old river waits near the quiet village . " * 60
    knobs = [{"rate": 1}, {"rate": 4}, {"rate": 8, "prefix_tokens": 100}, {"budget": 64},
             {"rate": 8, "question_tokens": 20}, {"rate": 4, "recompress_every": 4096},
             {"budget": 64, "prefill_block": 64}]  # fmt: skip
    with gateway.client() as client:
        tokens = client.post("/v1/tokenize", json={"prompt": text}).json()["tokens"]
        for number, knob in enumerate(knobs):
            body = {"input_ids": tokens, "kv_compression": knob, "extra_key": str(number),
                    "sampling_params": {"temperature": 0, "max_new_tokens": 2}}  # fmt: skip
            report = client.post("/generate", json=body).json()["kv_compression"]
            digests = chained_digests(tokens, None, 16)
            found = Prompt(parse(knob), len(tokens), 0, 1, digests).footprint(16)
            told = report["blocks"]["after"] + report["blocks"]["shared"]
            assert report["skipped"] is None
            assert found.own + sum(found.shared.values()) >= told, knob
            if not knob.get("recompress_every"):
                assert found.own + sum(found.shared.values()) == told, (knob, json.dumps(report))
