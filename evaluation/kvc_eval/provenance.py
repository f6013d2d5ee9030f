"""What a result was measured with: versions, commit, machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

_PACKAGES = ("sgl-kvc", "sglang", "torch")


def commit() -> str:
    """The commit of this code, ``-dirty`` if it was changed; empty outside a git checkout."""
    file = Path(__file__)
    told = ""
    for command in (
        ["git", "ls-files", "--error-unmatch", file.name],  # the checkout has to be ours
        ["git", "describe", "--always", "--dirty"],
    ):
        try:
            done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
        except OSError:
            return ""
        if done.returncode:
            return ""
        told = done.stdout.strip()
    return told


def versions() -> dict[str, str]:
    """Versions of what is installed here: the server's too where that runs here."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """Processor and cores of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
