"""`make release-check`: is what would be released whole, and does it work where nothing else is?

Builds sdist and wheel (the wheel from the sdist), looks into both, installs the wheel into an empty
environment at the locked versions, and there asks pip, SGLang's plugin loader and `sgl-kvc demo`.

    python deploy/release_check.py             everything; downloads about 9 GB, takes some minutes
    python deploy/release_check.py --no-install    without the empty environment
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "release"
#: What the wheel has to hold, besides modules; and what it must not.
NEEDED = (
    "kvc_recall/recall/config.json", "kvc_recall/recall/model.safetensors",
    "kvc_recall/recall/tokenizer.json", "kvc_smollm2/smollm2/requirements.txt",
    "kvc_smollm2/smollm2/kvc_head_profile.json", "kvc_server/static/page.html",
    "kvc_eval/suites/text/annual_messages.txt", "sgl_kvc/plugin.py", "kvc_kernels/gpu/decode.py",
)  # fmt: skip
PACKAGES = {"sgl_kvc", "kvc_kernels", "kvc_server", "kvc_eval", "kvc_recall", "kvc_smollm2"}
ENTRY_POINTS = (
    "sgl-kvc = kvc_server.cli:main", "sgl_kvc = sgl_kvc.plugin:register",
    "sgl_kvc_cpu = sgl_kvc.platform:activate",
)  # fmt: skip
#: Run in the empty environment: SGLang's own loader finds and runs the plugin.
PROGRAM = """
from importlib.metadata import entry_points
names = {(p.group, p.name) for g in ("sglang.srt.plugins", "sglang.srt.platforms")
         for p in entry_points(group=g)}
assert names >= {("sglang.srt.plugins", "sgl_kvc"), ("sglang.srt.platforms", "sgl_kvc_cpu")}, names
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
assert "kvc" in ATTENTION_BACKENDS, sorted(ATTENTION_BACKENDS)
"""


class NotReady(Exception):
    """Why this cannot be released."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-install", action="store_true", help="build and look, install nothing")
    options = parser.parse_args()
    try:
        version = same_version()
        sdist, wheel = build()
        look_into_sdist(sdist)
        look_into_wheel(wheel, version)
        if not options.no_install:
            try_in_empty_environment(wheel)
    except NotReady as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    print(f"release-check: {version} is ready: {sdist.name}, {wheel.name}")
    return 0


def same_version() -> str:
    """The version, which code, changelog, chart, compose files agree in. Raises NotReady."""

    def found(path: str, pattern: str) -> list[str]:
        return re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE)

    chart = "deploy/helm/sgl-kvc/Chart.yaml"

    told = {
        "sgl_kvc/__init__.py": found("sgl_kvc/__init__.py", r'^__version__ = "(.+)"$'),
        "CHANGELOG.md": found("CHANGELOG.md", r"^## (\S+)")[:1],
        "Chart.yaml": found(chart, r'^(?:version|appVersion): "?([^"\n]+)'),
        "compose.yaml": found("deploy/compose.yaml", r"image: sgl-kvc-\w+:(.+)$"),
        "compose.gpu.yaml": found("deploy/compose.gpu.yaml", r"image: sgl-kvc-\w+:(.+)$"),
    }
    versions = {version for each in told.values() for version in each}
    if len(versions) != 1 or not all(told.values()):
        raise NotReady(f"versions differ: {told}")
    return versions.pop()


def build() -> tuple[Path, Path]:
    """An sdist of the checkout, and the wheel made from it."""
    shutil.rmtree(OUT, ignore_errors=True)
    _run([sys.executable, "-m", "build", "--outdir", str(OUT), str(ROOT)])
    (sdist,), (wheel,) = OUT.glob("*.tar.gz"), OUT.glob("*.whl")
    return sdist, wheel


def look_into_sdist(path: Path) -> None:
    """Raises NotReady for a file that is missing, or a link that leads out of it."""
    with tarfile.open(path) as archive:
        members = {member.name.partition("/")[2]: member for member in archive}
    missing = {"LICENSE", "NOTICE", "README.md", "pyproject.toml"} - set(members)
    if missing:
        raise NotReady(f"{path.name} lacks {sorted(missing)}")
    if links := [name for name, member in members.items() if member.issym()]:
        raise NotReady(f"{path.name} has links: {links}")


def look_into_wheel(path: Path, version: str) -> None:
    """Raises NotReady for what is missing in it, or there and not ours to install."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        info = f"sgl_kvc-{version}.dist-info"
        if missing := {*NEEDED, f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} - names:
            raise NotReady(f"{path.name} lacks {sorted(missing)}")
        others = {name.partition("/")[0] for name in names} - PACKAGES - {info}
        if others:
            raise NotReady(f"{path.name} would install {sorted(others)} too")
        points = archive.read(f"{info}/entry_points.txt").decode()
        told = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    if missing_points := [point for point in ENTRY_POINTS if point not in points]:
        raise NotReady(f"{path.name} has no entry point {missing_points}")
    if (told["Version"], told["License-Expression"]) != (version, "Apache-2.0"):
        raise NotReady(f"{path.name} says {told['Version']}, {told['License-Expression']}")


def try_in_empty_environment(wheel: Path) -> None:
    """Install, and run what a user runs first; far from the source tree."""
    home = OUT / "venv"
    venv.create(home, with_pip=True, clear=True)
    python, away = str(home / "bin" / "python"), OUT / "away"
    away.mkdir()
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    constraint = ["--constraint", str(ROOT / "requirements.lock")]
    _run([*pip, "install", "--quiet", *constraint, str(wheel)], away)
    _run([*pip, "check"], away)
    _run([python, "-c", PROGRAM], away)
    _run([str(home / "bin" / "sgl-kvc"), "--version"], away)
    _run([str(home / "bin" / "sgl-kvc"), "demo", "--tokens", "256"], away)


def _run(command: list[str], folder: Path = ROOT) -> None:
    print("+", *command, flush=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if subprocess.run(command, cwd=folder, env=env).returncode:
        raise NotReady(f"{' '.join(command)} failed")


if __name__ == "__main__":
    sys.exit(main())
