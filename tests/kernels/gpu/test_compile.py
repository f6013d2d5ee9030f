"""Every kernel compiles for every architecture it is meant for, whatever is in this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.kernels.gpu.compiled import SHARED


@pytest.mark.parametrize("architecture", SHARED)
def test_compiles_ahead_of_time(architecture, tmp_path):
    """In a process of its own: this one may hold the kernels for Triton's interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gpu.compiled", str(architecture)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    compiled = re.findall(r"^\w+", done.stdout, re.MULTILINE)
    assert {"decode", "extend", "merge", "metric"} <= set(compiled)
