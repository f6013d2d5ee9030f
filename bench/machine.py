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
    root = Path(__file__).parent
    head = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True
    )
    return head.stdout.strip() or "unknown"
