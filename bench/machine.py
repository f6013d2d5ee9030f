"""What a measurement was taken on, so that a number in the docs can name it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch


def describe() -> dict:
    """Device, versions and commit, as recorded with every result."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or f"{_cpu()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("sglang", "torch", "sgl-kvc")
        },
        "commit": _commit(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    """The commit; "-dirty" if any tracked file but recorded results differs from it."""
    changed = ["diff", "--quiet", "HEAD", "--", ":/", ":!/bench/results"]
    head = _git("describe", "--always").stdout.strip()
    return f"{head}-dirty" if head and _git(*changed).returncode else head or "unknown"


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
