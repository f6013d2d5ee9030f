"""How many programs of a compiled kernel a GPU holds at once."""

from __future__ import annotations

import dataclasses

import torch

#: Shared memory that each program takes beside its own, in bytes, and the unit of its own.
_RESERVED, _SHARED_UNIT = 1 << 10, 128
#: Registers are given to warps by so many; a processor has four parts, and a warp is in one.
_REGISTER_UNIT, _PARTS = 256, 4


@dataclasses.dataclass(frozen=True)
class Processor:
    """What a multiprocessor has (CUDA C++ Programming Guide, table of capabilities).

    Attributes
    ----------
    shared : bytes of shared memory. registers : of 32 bits. warps, programs : that it holds.
    """

    shared: int
    registers: int
    warps: int
    programs: int

    @classmethod
    def of(cls, device: torch.device) -> Processor:
        """Of a GPU that is there.

        What PyTorch does not tell is what all have: so many registers, and room for 16 programs.
        """
        found = torch.cuda.get_device_properties(device)
        warps = found.max_threads_per_multi_processor // 32
        return cls(found.shared_memory_per_multiprocessor, 1 << 16, warps, 16)

    def resident(self, *, registers: int, shared: int, warps: int) -> int:
        """Programs it holds at once, each of so many `warps`.

        Parameters
        ----------
        registers : of a thread. shared : bytes of a program.
        """
        own = -(-shared // _SHARED_UNIT) * _SHARED_UNIT + _RESERVED
        of_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
        held = self.registers // _PARTS // of_warp * _PARTS
        return min(self.shared // own, min(held, self.warps) // warps, self.programs)
