"""What of selection is compiled for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Iterator

from kvc_kernels.gpu.select import (
    _LIFTED,
    _TILE,
    _compete_kernel,
    _kept_kernel,
    _protect_kernel,
    _share_kernel,
)

from tests.kernels.gpu.cases_attention import case

NUMBERS = dict.fromkeys(
    (
        "row_pages", "rows", "begin", "per_group", "groups", "total", "sinks", "recent", "digit",
    ),
    "i32",
)  # fmt: skip
TENSORS = {
    "scores": "*fp32", "pages": "*i64", "positions": "*i64", "weights": "*fp32", "tables": "*i32",
    "last": "*i32", "first": "*i64", "limit": "fp32", "protected": "fp32",
}  # fmt: skip


def _case(name: str, kernel, constants: dict, **signature: str) -> tuple:
    types = TENSORS | NUMBERS | signature
    given = {arg: types[arg] for arg in kernel.arg_names if arg not in constants}
    return case(name, kernel, given, constants)


def cases(architecture: int) -> Iterator[tuple]:
    """Every page size; nothing here depends on the architecture."""
    del architecture
    for page in (8, 16, 32, 64):
        tile = {"P": page, "TILE": _TILE}
        yield _case(f"kept_positions P {page}", _kept_kernel, tile | {"ROWS": 256})
    for given, weights in (("i32", True), ("i32", False), ("*i64", False)):
        kind = f"{'weighted, ' if weights else ''}won {given}"
        numbers = {"won": given, "safe": given}
        constants = {"P": 16, "TILE": _TILE} | ({} if weights else {"weights": None})
        yield _case(f"compete {kind}", _compete_kernel, constants, **numbers)
        yield _case(f"share {kind}", _share_kernel, {"P": 16, "ROWS": 256}, **numbers)
    yield _case("protect", _protect_kernel, {"TILE": _LIFTED, "first": None})
    yield _case("protect from first", _protect_kernel, {"TILE": _LIFTED})
