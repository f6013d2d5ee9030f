"""How many programs a GPU holds, as NVIDIA's occupancy calculator has it."""

from __future__ import annotations

import pytest
from kvc_kernels.gpu.occupancy import Processor

H200 = Processor(shared=228 << 10, registers=1 << 16, warps=64, programs=32)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "held"),
    [
        (32, 0, 4, 16),  # warps
        (32, 0, 1, 32),  # programs
        (64, 0, 8, 4),  # registers
        (168, 0, 12, 1),
        (217, 0, 1, 8),  # each part of the processor has registers for two warps
        (255, 0, 4, 2),
        (32, 48 << 10, 1, 4),  # shared memory, and 1 KB for each program
        (32, 227 << 10, 4, 1),
        (32, (227 << 10) + 1, 4, 0),
        (32, 100, 1, 32),
    ],
)
def test_programs_of_a_processor(registers, shared, warps, held):
    assert H200.resident(registers=registers, shared=shared, warps=warps) == held
