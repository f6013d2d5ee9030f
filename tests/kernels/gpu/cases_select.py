"""What of `kept_positions` is compiled for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Iterator

from kvc_kernels.gpu.select import _TILE, _kept_kernel

from tests.kernels.gpu.cases_attention import case


def cases(architecture: int) -> Iterator[tuple]:
    """Every page size; nothing here depends on the architecture."""
    del architecture
    signature = dict.fromkeys(_kept_kernel.arg_names[:5], "*i64")
    signature |= {"scores": "*fp32", "least": "*fp32", "total": "i32"}
    for page in (8, 16, 32, 64):
        constants = {"P": page, "TILE": _TILE}
        yield case(f"kept_positions P {page}", _kept_kernel, signature, constants)
