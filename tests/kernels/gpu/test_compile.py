"""Every kernel compiles for every architecture it is meant for, whatever is in this machine.

Of decode also what it compiles to: what there is to say about its speed without a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
from kvc_kernels.gpu.occupancy import Processor

from tests.kernels.gpu.compiled import SHARED


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU of an architecture, by its data sheet; clocks are the highest.

    Attributes
    ----------
    bandwidth : bytes per second of the memory. processors, clock : how many, and of each in Hz.
    """

    name: str
    bandwidth: float
    processors: int
    clock: float
    processor: Processor

    @property
    def bytes_per_cycle(self) -> float:
        """Of one processor's share of the bandwidth."""
        return self.bandwidth / self.processors / self.clock


DEVICES = {
    80: Device("A100 80GB", 2.04e12, 108, 1.41e9, Processor(164 << 10, 1 << 16, 64, 32)),
    89: Device("L40S", 0.864e12, 142, 2.52e9, Processor(100 << 10, 1 << 16, 48, 24)),
    90: Device("H200", 4.8e12, 132, 1.98e9, Processor(228 << 10, 1 << 16, 64, 32)),
    100: Device("B200", 8e12, 148, 1.96e9, Processor(228 << 10, 1 << 16, 64, 32)),
}
#: Warp instructions that a processor issues in a cycle, and what share of them decode may take.
ISSUED, SHARE = 4, 0.6
#: Seconds from asking a busy memory for bytes to having them.
LATENCY = 1e-6


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
    assert {"decode", "extend", "merge", "metric", "schedule", "second"} <= set(compiled)
    decodes = re.findall(r"^decode (.*?): ({.*})$", output, re.MULTILINE)
    assert len(decodes) == (6 if architecture < 89 else 7)
    for name, facts in decodes:
        check_decode(DEVICES[architecture], name, json.loads(facts))


def check_decode(device: Device, name: str, facts: dict) -> None:
    """That decode is bound by the memory, as far as its machine code can say it."""
    about = f"{device.name}, {name}: {facts}"
    assert facts["stack"] == 0, f"registers are spilled: {about}"
    in_flight = facts["waits"][0] // facts["groups"]
    assert in_flight >= 2, f"tiles under way while one is computed: {about}"
    resident = device.processor.resident(
        registers=facts["registers"], shared=facts["shared"], warps=facts["warps"]
    )
    by_shared = device.processor.resident(registers=1, shared=facts["shared"], warps=facts["warps"])
    assert resident == by_shared >= 1, f"registers, not shared memory, are what is short: {about}"
    if name.startswith("fp32"):
        return  # no matrix units in full precision
    # Page ids travel in copies of 32 bits; keys and values of 128 only.
    assert set(facts["copies"]) == {"32", "128"}, about
    read = facts["copies"]["128"] * 16 * 32 * facts["warps"]
    assert resident * in_flight * read >= LATENCY * device.bandwidth / device.processors, about
    cycles = read / device.bytes_per_cycle
    instructions = sum(facts["loop"].values()) * facts["warps"]
    assert instructions <= SHARE * ISSUED * cycles, about
