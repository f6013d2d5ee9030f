"""Compile kernels for GPUs that are not there: run by test_compile.py in a process of its own.

Each `cases_*.py` beside this holds ``CASES``: (kernel, signature, constants, options).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Shared memory a program may have, in bytes (CUDA C++ Programming Guide, table of capabilities).
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def main(architecture: int) -> None:
    """Compile every case for one architecture (90 is sm_90) and print what came out."""
    for file in sorted(Path(__file__).parent.glob("cases_*.py")):
        module = importlib.import_module(f"tests.kernels.gpu.{file.stem}")
        for name, kernel, signature, constants, options in module.cases(architecture):
            source = ASTSource(kernel, signature, constexprs=constants)
            target = GPUTarget("cuda", architecture, 32)
            compiled = triton.compile(source, target=target, options=options)
            if compiled.metadata.shared > SHARED[architecture]:
                raise SystemExit(f"{name}: {compiled.metadata.shared} bytes of shared memory")
            print(f"{name}: {len(compiled.asm['cubin'])} bytes", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
