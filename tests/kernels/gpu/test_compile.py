"""Every kernel compiles for every architecture it is meant for, whatever is in this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.kernels.gpu.compiled import SHARED


@pytest.fixture(scope="module")
def compilers(tmp_path_factory) -> dict[int, subprocess.Popen]:
    """One for each architecture, all at once; this process may hold interpreted kernels."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    return {
        architecture: subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.gpu.compiled", str(architecture)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for architecture in SHARED
    }


@pytest.mark.parametrize("architecture", SHARED)
def test_compiles_ahead_of_time(compilers, architecture):
    output, errors = compilers[architecture].communicate()
    assert compilers[architecture].returncode == 0, output + errors[-4000:]
    compiled = re.findall(r"^\w+", output, re.MULTILINE)
    assert {"decode", "extend", "merge", "metric"} <= set(compiled)
