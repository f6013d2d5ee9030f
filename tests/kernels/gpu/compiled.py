"""Compile kernels for GPUs that are not there: run by test_compile.py in a process of its own.

Each `cases_*.py` beside this holds ``CASES``: (kernel, signature, constants, options). Pointers are
aligned to 16 bytes, and so are a query's rows, as the kernels are launched.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.gpu.machine_code import read

#: Shared memory a program may have, in bytes (CUDA C++ Programming Guide, table of capabilities).
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


def main(architecture: int) -> None:
    """Compile every case for one architecture (90 is sm_90) and print what came out."""
    for file in sorted(Path(__file__).parent.glob("cases_*.py")):
        module = importlib.import_module(f"tests.kernels.gpu.{file.stem}")
        for name, kernel, signature, constants, options in module.cases(architecture):
            compiled = compile_case(architecture, kernel, signature, constants, options)
            if compiled.metadata.shared > SHARED[architecture]:
                raise SystemExit(f"{name}: {compiled.metadata.shared} bytes of shared memory")
            facts = {"bytes": len(compiled.asm["cubin"])}
            if name.startswith("decode"):
                facts |= read(compiled)
            print(f"{name}: {json.dumps(facts)}", flush=True)


def compile_case(architecture: int, kernel, signature: dict, constants: dict, options: dict):
    aligned = [
        index
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name == "query_stride"
    ]
    source = ASTSource(
        kernel,
        signature,
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


if __name__ == "__main__":
    main(int(sys.argv[1]))
