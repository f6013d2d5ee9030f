"""Dockerfile and compose file: what they name is there, and the gateway runs on its lock alone."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib import metadata

import pytest
import yaml
from kvc_server.cli import build_parser
from kvc_server.serve import settings_of
from packaging.utils import canonicalize_name

from tests.deploy.charts import ROOT, tool, tools_module

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
TARGETS = dict(re.findall(r"^FROM \S+ AS (\S+)()$", DOCKERFILE, re.M))
FILES = ("compose.yaml", "compose.gpu.yaml")
COMPOSE = {name: yaml.safe_load((ROOT / "deploy" / name).read_text()) for name in FILES}
SERVICES = COMPOSE["compose.yaml"]["services"]


def locked(name: str) -> dict[str, str]:
    """Version by canonical name."""
    lines = (ROOT / name).read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pins}


def test_the_gateways_lock_is_made_from_the_lock() -> None:
    """If this fails: make lock."""
    ours, everything = locked("requirements-gateway.lock"), locked("requirements.lock")
    assert ours.items() <= everything.items()
    assert not {"torch", "sglang", "numpy", "transformers"} & set(ours)
    made = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "lock_gateway.py")], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout == (ROOT / "requirements-gateway.lock").read_text()


def test_the_gateway_imports_nothing_that_its_lock_lacks() -> None:
    """As in its image: of ours `sgl_kvc`, `kvc_server` and `kvc_eval`, of others what is locked."""
    names = set(locked("requirements-gateway.lock"))
    refused = {
        module
        for module, packages in metadata.packages_distributions().items()
        if not any(canonicalize_name(package) in names for package in packages)
    } | {"kvc_kernels", "kvc_recall", "kvc_smollm2"}
    refused -= {"sgl_kvc", "kvc_server", "kvc_eval"}
    assert {"torch", "sglang", "numpy"} <= refused
    program = f"""
import importlib.abc, sys
REFUSED = {refused!r}
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"{{name}} is not in the image")
sys.meta_path.insert(0, Refuse())
import kvc_server.plan_report, kvc_server.serve, kvc_server.policies_report, kvc_server.key_command
from kvc_server import tracing
from kvc_server.app import create_app
from kvc_server.cli import build_parser
from kvc_server.policies import catalogue
from kvc_server.serve import settings_of
tracing.provider()
catalogue()
options = build_parser().parse_args(["serve", "--worker-url", "http://a", "--traces"])
create_app(settings_of(options, ()))
try:
    import numpy
except ImportError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "refused"


def test_there_are_three_images() -> None:
    assert {"gateway", "cpu", "cuda"} <= set(TARGETS)
    used = {service["build"]["target"] for file in COMPOSE.values()
            for service in file["services"].values() if "build" in service}  # fmt: skip
    assert used == {"gateway", "cpu", "cuda"}


def test_what_is_copied_is_there_and_not_ignored() -> None:
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines()
              if line.startswith("!")]  # fmt: skip
    copied = [
        path
        for words in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M)
        for path in shlex.split(words)[:-1]
    ]
    assert len(copied) > 10
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(f"{path}/".startswith(f"{allowed}/") for allowed in let_in), path


@pytest.mark.parametrize("target", ["gateway", "cpu", "cuda"])
def test_images_are_not_roots_and_tell_their_health(target: str) -> None:
    own = stages(target)
    assert re.findall(r"^USER (\S+)$", own, re.M)[-1] == "10001:10001"
    (health,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", own, re.M)
    path = "/health" if target == "cuda" else "/readiness"
    assert f"'GET', '{path}'" in health
    compile(yaml.safe_load(health)[2], "HEALTHCHECK", "exec")
    assert not re.search(r"^(ARG|ENV) .*(TOKEN|KEY|PASSWORD|SECRET)", own, re.M)


def stages(target: str) -> str:
    """The lines of a target and of all that it is built on."""
    (start,) = re.finditer(rf"^FROM (\S+) AS {target}$", DOCKERFILE, re.M)
    after = DOCKERFILE[start.end() :]
    own = after[: end.start()] if (end := re.search(r"^FROM ", after, re.M)) else after
    return (stages(start[1]) if start[1] in TARGETS else "") + own


def test_the_gateways_commands_are_understood() -> None:
    (image,) = re.findall(r'^CMD (\["serve".*worker-url.*\])$', DOCKERFILE, re.M)
    for words in (yaml.safe_load(image), SERVICES["gateway"]["command"]):
        options = build_parser().parse_args([str(word) for word in words])
        assert settings_of(options, ()).worker_url == "http://worker:30000"
    grace = int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace >= options.drain_timeout + 10


def test_what_compose_mounts_is_there() -> None:
    seen = 0
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / "deploy" / source).is_file(), source
                seen += 1
            else:
                assert source in COMPOSE["compose.yaml"]["volumes"]
    assert seen == 5


def test_compose_gives_nobody_more_than_needed() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "whoever wants more says so"
        assert set(service["networks"]) <= set(COMPOSE["compose.yaml"]["networks"])
        assert name != "worker" or "ports" not in service
    assert COMPOSE["compose.yaml"]["networks"]["back"] == {"internal": True}


@pytest.mark.parametrize("name", FILES)
def test_compose_files_are_as_their_specification_says(name: str) -> None:
    parse = tools_module("compose_spec").PyCompose.from_json
    told = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", json.dumps(COMPOSE[name]))
    assert set(parse(told).service_names()) == set(COMPOSE[name]["services"])
    for right, wrong in (('"image"', '"imagine"'), ('"1800s"', '"1800"'), ('"300s"', '"300"')):
        if right in told:
            with pytest.raises(ValueError, match=r"imagine|duration"):
                parse(told.replace(right, wrong))


@pytest.mark.skipif(tool("hadolint") is None, reason="no hadolint: make deploy-tools")
def test_hadolint_finds_nothing() -> None:
    command = [str(tool("hadolint")), str(ROOT / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
