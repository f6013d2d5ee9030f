"""What a client is told when something is wrong, without any worker: real sockets only."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from kvc_server.errors import from_worker

from tests.gateways import Gateway

PATHS = ("/v1/chat/completions", "/v1/completions", "/generate")


def error(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, whose shape is checked."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("knob", "param"),
    [
        ('{"rate": 0.5}', "kv_compression.rate"),
        ('{"rate": -1}', "kv_compression.rate"),
        ('{"rate": "x"}', "kv_compression.rate"),
        ('{"rate": NaN}', "kv_compression.rate"),
        ('{"rate": Infinity}', "kv_compression.rate"),
        ('{"rate": 1e9}', "kv_compression.rate"),
        ('{"rate": true}', "kv_compression.rate"),
        ('{"rate": 1%s}' % ("0" * 400), "kv_compression.rate"),
        ('{"rate": 8, "budget": 64}', "kv_compression.budget"),
        ('{"rate": 8, "policy": "magic"}', "kv_compression.policy"),
        ('{"rate": 8, "ratio": 2}', "kv_compression.ratio"),
        ('{"rate": 8, "\\ud800": 2}', "kv_compression.\ud800"),
        ("{}", "kv_compression.rate"),
        ("8", "kv_compression"),
        ("[8]", "kv_compression"),
    ],
)
def test_bad_knobs_name_the_field(lonely: Gateway, path: str, knob: str, param: str) -> None:
    body = f'{{"model": "m", "kv_compression": {knob}}}'
    answer = httpx.post(lonely.url + path, content=body)
    assert answer.status_code == 400
    assert error(answer)["param"] == param
    assert error(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("text", ["x", "nan", "0.5", "1e9", ""])
def test_bad_headers_name_the_header(lonely: Gateway, text: str) -> None:
    for path in PATHS:
        answer = httpx.post(lonely.url + path, json={}, headers={"X-KV-Compression-Rate": text})
        assert answer.status_code == 400
        assert error(answer)["param"] == "X-KV-Compression-Rate"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"8", b"null", b"\xff\xfe\xff", b'{"a": %s}' % (b"[" * 100_000)]
)
def test_bodies_that_are_no_json_object(lonely: Gateway, body: bytes) -> None:
    answer = httpx.post(f"{lonely.url}/generate", content=body)
    assert answer.status_code == 400
    assert error(answer)["code"] == "invalid_json"


def test_unread_encoding(lonely: Gateway) -> None:
    answer = httpx.post(f"{lonely.url}/generate", content=b"", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415
    error(answer)


def test_unknown_paths_and_methods(lonely: Gateway) -> None:
    for path in ("/v1", "/v1/nothing", "/docs", "/redoc"):
        answer = httpx.get(lonely.url + path)
        assert answer.status_code == 404
        assert error(answer)["code"] == "unknown_url"
    answer = httpx.get(f"{lonely.url}/generate")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    error(answer)


def test_without_a_worker_the_gateway_lives_and_says_so(lonely: Gateway) -> None:
    assert httpx.get(f"{lonely.url}/live").status_code == 200
    for path in ("/health", "/readiness"):  # a router asks the first
        ready = httpx.get(lonely.url + path)
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
    for answer in (
        httpx.get(f"{lonely.url}/v1/models"),
        httpx.post(f"{lonely.url}/generate", json={"text": "hello", "stream": True}),
    ):
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert error(answer)["code"] == "worker_unavailable"
    metrics = httpx.get(f"{lonely.url}/metrics")
    assert metrics.status_code == 200
    assert "kvc_worker_up 0.0" in metrics.text
    assert 'kvc_requests_total{endpoint="/generate",status="503"}' in metrics.text


def test_the_openai_client_understands_the_errors(lonely: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{lonely.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="m", prompt="hello", extra_body={"kv_compression": {"rate": 0}}
        )
    assert caught.value.param == "kv_compression.rate"
    with pytest.raises(openai.InternalServerError) as down:
        client.completions.create(model="m", prompt="hello")
    assert down.value.status_code == 503


@pytest.mark.parametrize(
    ("body", "message", "param", "code"),
    [
        (b'{"object": "error", "message": "no", "type": "BadRequest", "param": null, "code": 400}',
         "no", None, None),
        (b'{"error": {"message": "no"}}', "no", None, None),
        (b'{"error": {"message": "no", "code": "too_long", "param": "prompt"}}',
         "no", "prompt", "too_long"),
        (b'{"error": "no"}', "no", None, None),
        (b'{"message": "kv_compression.rate: too high", "code": 400}',
         "kv_compression.rate: too high", "kv_compression.rate", None),
        (b'{"detail": [{"loc": ["body", "n"], "msg": "must be a number"}]}',
         "n: must be a number", "n", None),
        (b'{"message": "2 validation errors:\\n  {\'type\': \'x\', \'loc\': (\'body\', \'n\', 0), '
         b'\'msg\': \'It\\\\\'s odd\', \'input\': 8, \'ctx\': {\'error\': E(1)}}'
         b'\\n  File \\"/secret\\""}',
         "n.0: It's odd", "n.0", None),
        (b'{"message": "1 validation error for Chat\\nn.0\\n  Too low [type=x, '
         b'input_value=\'secret\']"}',
         "n.0: Too low", "n.0", None),
        (b'{"detail": "Not Found"}', "Not Found", None, None),
        (b"<h1>Bad gateway</h1>", "<h1>Bad gateway</h1>", None, None),
        (b"", "the worker answered 400", None, None),
        (b"[1]", "[1]", None, None),
    ],
)  # fmt: skip
def test_every_shape_of_a_workers_error(
    body: bytes, message: str, param: str | None, code: str | None
) -> None:
    found = from_worker(400, body)
    assert (found.message, found.param, found.code) == (message, param, code)
    assert (found.status, found.type) == (400, "invalid_request_error")
