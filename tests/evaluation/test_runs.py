"""Whole runs of `sgl-kvc eval`: through the real gateway, and against a plain endpoint."""

from __future__ import annotations

import dataclasses
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from kvc_eval.store import ANSWERS
from kvc_recall.tasks import sample
from kvc_server.cli import main

from tests.gateways import Gateway


def evaluate(url: str, out: Path, *arguments: str) -> int:
    return main(["eval", "--url", *url.split(), "--out", str(out), *arguments])


def cells(out: Path) -> dict[tuple[str, str, float], dict[str, Any]]:
    found = json.loads((out / "results.json").read_text())["cells"]
    return {(cell["question"], cell["policy"], cell["rate"]): cell for cell in found}


def answers(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / ANSWERS).read_text().splitlines()]


def requests_of(gateway: Gateway) -> float:
    """Generations the gateway was asked for so far."""
    text = httpx.get(f"{gateway.url}/metrics", timeout=120).text
    return sum(map(float, re.findall(r"^kvc_requests_total\{.*\} (\S+)$", text, re.MULTILINE)))


# --- the real gateway ----------------------------------------------------------------------

RECALL = (
    "--suite", "recall", "--tasks", "single", "copy32", "--length", "512", "--n", "8",
    "--policies", "kv-compress", "random", "--rates", "2", "16", "--concurrent", "4",
)  # fmt: skip


@pytest.mark.parametrize("how", ["--batched", "--no-batched"])
def test_recall_through_the_gateway(gateway: Gateway, tmp_path: Path, how: str) -> None:
    assert evaluate(gateway.url, tmp_path, *RECALL, how) == 0
    found = cells(tmp_path)
    assert len(found) == 1 + 2 * 2
    off = found["inside", "off", 1]
    assert (off["n"], off["kept"]) == (8, 1)
    assert off["score"] >= 0.75
    assert off["prompt_tokens"] == 512
    for rate in (2, 16):
        good, bad = found["inside", "kv-compress", rate], found["inside", "random", rate]
        assert good["kept"] == bad["kept"] == pytest.approx(1 / rate)
        assert good["tasks"]["single"]["score"] == off["tasks"]["single"]["score"]
        assert bad["tasks"]["copy32"]["score"] == 0
        assert bad["score"] < good["score"]
    page = (tmp_path / "report.md").read_text()
    assert "| kv-compress |" in page
    assert (tmp_path / "accuracy-512-inside.png").stat().st_size > 10_000

    before = requests_of(gateway)
    assert evaluate(gateway.url, tmp_path, *RECALL, how) == 0
    assert requests_of(gateway) - before < 8, "only what it has to ask to know the endpoint"
    assert cells(tmp_path) == found


def test_questions_asked_after_compression(gateway: Gateway, tmp_path: Path) -> None:
    more = ("--question", "inside", "after", "--tasks", "needles8", "--rates", "16", "--n", "12")
    assert evaluate(gateway.url, tmp_path, *RECALL, *more, "--policies", "snapkv") == 0
    found = cells(tmp_path)
    assert len(found) == 2 * (1 + 1)
    inside, after = (found[question, "snapkv", 16] for question in ("inside", "after"))
    assert (inside["question_tokens"], after["question_tokens"]) == (None, 9)
    assert inside["score"] >= 0.9
    assert found["after", "off", 1]["score"] >= 0.9
    assert after["score"] < 0.5, "the end of a document does not say what it will be asked"
    assert 1 / 16 <= after["kept"] < 1 / 8


def test_all_policies_of_the_server_are_measured_by_default(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = httpx.get(f"{gateway.url}/v1/kv_policies", timeout=120).json()["policies"]
    names = {policy["name"] for policy in listed}
    assert {"kv-compress", "random"} < names
    assert evaluate(
        gateway.url, tmp_path, "--suite", "recall", "--tasks", "single", "--n", "2", "--rates",
        "4", "--length", "256", "--question", "inside", "after",
    ) == 0  # fmt: skip
    left_out = set(re.findall(r"(\S+) is left out", capsys.readouterr().err))
    assert {policy for _, policy, _ in cells(tmp_path)} == {"off"} | names - left_out
    assert not {"kv-compress", "random"} & left_out


def test_ruler_is_sized_by_the_model(gateway: Gateway, tmp_path: Path) -> None:
    assert evaluate(
        gateway.url, tmp_path, "--suite", "ruler", "--length", "700", "--tasks", "niah_multikey",
        "cwe", "--n", "4", "--question", "after", "--policies", "streaming-llm", "--rates", "4",
    ) == 0  # fmt: skip
    for answer in answers(tmp_path):
        assert answer["prompt_tokens"] == pytest.approx(700, rel=0.05)
    told = [answer["question_tokens"] for answer in answers(tmp_path) if answer["cell"][3] == 4]
    assert len(told) == 4
    assert all(15 < tokens < 40 for tokens in told)


def test_a_file_in_longbench_format(gateway: Gateway, tmp_path: Path) -> None:
    rows, prompts = [], tmp_path / "prompts.json"
    for number in range(3):
        prompt = sample("single", 400, Random(f"row {number}"))
        context, question = prompt.text.rsplit(" . ", 1)
        rows.append({
            "context": f"{context} .", "input": question, "answers": ["wrong", prompt.answer],
            "dataset": "hotpotqa", "all_classes": None, "length": 400,
        })  # fmt: skip
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts.write_text(json.dumps({"hotpotqa": "{context} {input}"}))
    assert evaluate(
        gateway.url, tmp_path / "out", "--suite", "longbench", "--data", str(data), "--prompts",
        str(prompts), "--policies", "snapkv", "random", "--rates", "8",
    ) == 0  # fmt: skip
    found = cells(tmp_path / "out")
    assert found["inside", "off", 1]["tasks"] == {
        "hotpotqa": {"n": 3, "score": 1, "interval": pytest.approx([0.4385, 1], abs=1e-4)}
    }
    assert found["inside", "snapkv", 8]["score"] == 1
    assert found["inside", "random", 8]["score"] < 1


def test_what_the_gateway_refuses_is_said_before_anything_is_asked(
    gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = requests_of(gateway)
    assert evaluate(gateway.url, tmp_path, *RECALL, "--policies", "magic") == 2
    assert "unknown policy 'magic'" in capsys.readouterr().err
    assert evaluate(gateway.url, tmp_path, *RECALL, "--rates", "2", "65") == 2
    assert "must be at most 64 on this server" in capsys.readouterr().err
    assert requests_of(gateway) - before < 8
    assert not (tmp_path / ANSWERS).exists()


# --- a plain OpenAI-compatible endpoint ----------------------------------------------------


@dataclasses.dataclass
class Plain:
    """A server that knows every needle, does not compress, and fails when it is told to.

    Attributes
    ----------
    failures : statuses to answer with before anything else, one a request.
    broken : a prompt with this string in it is always refused.
    asked : user messages that came.
    keys : Authorization headers that came.
    """

    url: str = ""
    failures: list[int] = dataclasses.field(default_factory=list)
    broken: str | None = None
    asked: list[str] = dataclasses.field(default_factory=list)
    keys: set[str | None] = dataclasses.field(default_factory=set)


@pytest.fixture
def plain() -> Iterator[Plain]:
    state = Plain()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            models = {"data": [{"id": "plain"}]}
            self.reply(200, models) if self.path == "/v1/models" else self.reply(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert set(body) == {"model", "messages", "max_tokens", "temperature"}
            text = body["messages"][0]["content"]
            state.asked.append(text)
            state.keys.add(self.headers["authorization"])
            if state.failures:
                return self.reply(state.failures.pop(), {"error": {"message": "busy"}})
            if state.broken and state.broken in text:
                return self.reply(400, {"error": {"message": "cannot"}})
            answer = ", ".join(re.findall(r"magic numbers of \S+ is (\d+)", text))
            choice = {"message": {"role": "assistant", "content": answer}}
            usage = {"prompt_tokens": len(text.split())}
            return self.reply(200, {"choices": [choice], "usage": usage})

        def reply(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


NEEDLES = ("--tasks", "niah_single", "--length", "300", "--n", "6", "--concurrent", "2")


def test_an_endpoint_that_does_not_compress(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain.failures = [503]  # tried again
    assert evaluate(plain.url, tmp_path, *NEEDLES, "--question", "after") == 0
    assert "does not report kv_compression" in capsys.readouterr().err
    ((key, cell),) = cells(tmp_path).items()
    assert key == ("inside", "off", 1)
    assert (cell["n"], cell["score"], cell["kept"]) == (6, 1, None)
    assert cell["prompt_tokens"] == pytest.approx(300, abs=10)
    assert "it does not compress" in (tmp_path / "report.md").read_text()
    assert not list(tmp_path.glob("*.png"))


def test_several_servers_share_the_prompts(plain: Plain, tmp_path: Path) -> None:
    assert evaluate(f"{plain.url} {plain.url}", tmp_path, *NEEDLES) == 0
    assert sum("magic number" in text for text in plain.asked) == 6 + 2, "and two to be counted"
    assert cells(tmp_path)["inside", "off", 1]["n"] == 6


def test_failed_requests_are_reported_and_asked_again(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(plain.url, tmp_path / "first", *NEEDLES) == 0
    plain.broken = re.search(r"is (\d{7})\.", plain.asked[-1]).group(1)
    out = tmp_path / "second"
    assert evaluate(plain.url, out, *NEEDLES) == 1
    assert "1 requests failed" in capsys.readouterr().err
    (failed,) = [answer for answer in answers(out) if "failed" in answer]
    assert failed["failed"] == "HTTP 400: cannot"
    cell = cells(out)["inside", "off", 1]
    assert (cell["n"], cell["failed"], cell["score"]) == (5, 1, 1)
    plain.broken, plain.asked = None, []
    assert evaluate(plain.url, out, *NEEDLES) == 0
    assert sum("magic number" in text for text in plain.asked) == 1 + 2, "and two to be counted"
    assert cells(out)["inside", "off", 1]["n"] == 6


def test_an_endpoint_that_is_gone_ends_the_run(
    plain: Plain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain.broken = "magic"
    assert evaluate(plain.url, tmp_path, *NEEDLES) == 1
    assert "HTTP 400: cannot" in capsys.readouterr().err
    assert evaluate("http://127.0.0.1:1", tmp_path, *NEEDLES) == 1
    assert "ConnectError" in capsys.readouterr().err


def test_a_server_that_does_not_start_names_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--embedded", "--out", str(tmp_path), "--", "--host", "0.0.0.0"]) == 1
    printed = capsys.readouterr().err
    assert "the server ended (exit code 2) before it was ready" in printed
    assert f"its log is {tmp_path / 'server-1.log'} and ends with:" in printed
    assert "--host after --" in printed


def test_keys_are_sent_and_not_written(plain: Plain, tmp_path: Path) -> None:
    assert evaluate(plain.url, tmp_path, *NEEDLES, "--api-key", "s3cret") == 0
    assert plain.keys == {"Bearer s3cret"}
    assert not any("s3cret" in file.read_text() for file in tmp_path.iterdir())
