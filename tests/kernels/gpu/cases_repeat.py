"""What of the second reading is compiled for GPUs that are not there, tiles as launched."""

from __future__ import annotations

from collections.abc import Iterator

from kvc_kernels.gpu.repeat import _best, _sums

from tests.kernels.gpu.cases_attention import case

#: Type of queries and keys, head dim, query group, rows and keys of a tile.
SHAPES = [
    ("bf16", 128, 4, 64, 64),
    ("fp16", 64, 7, 64, 64),
    ("bf16", 96, 1, 64, 64),
    ("fp16", 256, 8, 32, 64),
    ("fp32", 128, 2, 16, 64),
]


def cases(architecture: int) -> Iterator[tuple]:
    """Both passes; nothing here depends on the architecture."""
    del architecture
    numbers = dict.fromkeys(("rows", "n", "part_rows", "part_keys"), "i32")
    for kind, dim, group, rows, tile in SHAPES:
        tensors = {"queries": f"*{kind}", "keys": f"*{kind}", "sums": "*fp32"}
        signature = {**tensors, **numbers, "log2_scale": "fp32"}
        constants = {
            "GROUP": group, "D": dim, "D_PAD": 1 << (dim - 1).bit_length(), "UPCAST": False,
            "ROWS": rows, "TILE": tile,
        }  # fmt: skip
        name = f"{kind}, D {dim}, G {group}"
        yield case(f"repeat sums {name}", _sums, signature | {"lse": "*fp32"}, constants)
        yield case(f"repeat best {name}", _best, signature | {"scores": "*fp32"}, constants)
