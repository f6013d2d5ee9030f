"""What a release is called, and that what it would leave out is noticed."""

from __future__ import annotations

import importlib.util
import io
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import sgl_kvc
from tests.deploy.charts import ROOT


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", ROOT / "deploy" / "release_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_everything_has_one_version(check: ModuleType) -> None:
    assert check.same_version() == sgl_kvc.__version__


def test_what_the_wheel_needs_is_in_the_source(check: ModuleType) -> None:
    """Where links stand in for folders too."""
    folders = [ROOT / name for name in (".", "kernels", "server", "evaluation", "models")]
    for needed in check.NEEDED:
        assert any((folder / needed).is_file() for folder in folders), needed


def wheel(path: Path, check: ModuleType, *, without: str = "", more: str = "") -> Path:
    info = "sgl_kvc-1.0.dist-info"
    names = {*check.NEEDED, f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"}
    with zipfile.ZipFile(path, "w") as archive:
        for name in (names | {more}) - {without, ""}:
            archive.writestr(name, "")
        archive.writestr(f"{info}/entry_points.txt", "\n".join(check.ENTRY_POINTS[1:]))
        archive.writestr(f"{info}/METADATA", "Version: 1.0\nLicense-Expression: Apache-2.0\n\n")
    return path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"without": "kvc_recall/recall/model.safetensors"}, "lacks"),
        ({"more": "tests/conftest.py"}, "would install"),
        ({}, "no entry point"),
    ],
)
def test_a_wheel_that_is_not_whole_is_noticed(
    tmp_path: Path, check: ModuleType, change: dict, told: str
) -> None:
    with pytest.raises(check.NotReady, match=told):
        check.look_into_wheel(wheel(tmp_path / "it.whl", check, **change), "1.0")


def test_an_sdist_with_links_is_noticed(tmp_path: Path, check: ModuleType) -> None:
    path = tmp_path / "it.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("LICENSE", "NOTICE", "README.md", "pyproject.toml"):
            archive.addfile(tarfile.TarInfo(f"it-1.0/{name}"), io.BytesIO())
    check.look_into_sdist(path)
    link = tarfile.TarInfo("it-1.0/models/link")
    link.type, link.linkname = tarfile.SYMTYPE, "../elsewhere"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("LICENSE", "NOTICE", "README.md", "pyproject.toml"):
            archive.addfile(tarfile.TarInfo(f"it-1.0/{name}"), io.BytesIO())
        archive.addfile(link)
    with pytest.raises(check.NotReady, match="has links"):
        check.look_into_sdist(path)
