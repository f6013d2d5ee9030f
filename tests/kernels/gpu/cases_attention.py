"""Decode and extend, for every cache type and head dim."""

from __future__ import annotations

from collections.abc import Iterator

from kvc_kernels.gpu.decode import REGISTERS_OF_8_BITS, _accumulate, _decode, _merge
from kvc_kernels.gpu.extend import _extend

#: Query and cache type, head dim, page size, query group.
SHAPES = [
    ("bf16", "bf16", 128, 16, 4),
    ("fp16", "fp16", 64, 8, 1),
    ("fp16", "fp16", 96, 32, 3),
    ("bf16", "bf16", 256, 64, 16),
    ("fp32", "fp32", 32, 16, 2),
    ("bf16", "fp8e5", 128, 16, 8),
    ("fp16", "fp8e4nv", 128, 16, 4),
]
TABLES = {
    "req_to_token": "*i32", "begin": "*i32", "first": "*i32", "count": "*i32", "stride": "*i32",
    "request": "*i64", "seq_len": "*i64",
}  # fmt: skip
NUMBERS = {"scale": "fp32", "layer": "i32", "context": "i32", "query_stride": "i32"}


def cases(architecture: int) -> Iterator[tuple]:
    for q, kv, dim, page, group in SHAPES:
        if kv == "fp8e4nv" and architecture < 89:
            continue
        pad = 1 << (dim - 1).bit_length()
        name = f"{q} over {kv}, D {dim}, P {page}, G {group}"
        same = {
            "HEADS": 8, "PER_BLOCK": 256, "P": page, "GROUP": group, "D": dim, "D_PAD": pad,
            "UPCAST": False,
        }  # fmt: skip
        values = {"DV": dim, "DV_PAD": pad}
        caches = {"query": f"*{q}", "arena_k": f"*{kv}", "arena_v": f"*{kv}"}
        results = {"out": f"*{q}", "lse": "*fp32"}
        stages = 3 if pad <= 128 else 2
        split = {**same, "GROUP_PAD": 16, "TILE": {256: 32, 128: 64}.get(pad, 128)}
        yield case(
            f"decode {name}", _decode, {**caches, **TABLES, **results, **NUMBERS},
            split | values, num_stages=3, maxnreg=REGISTERS_OF_8_BITS if "fp8" in kv else None,
        )  # fmt: skip
        yield case(
            f"extend {name}", _extend, {**caches, **TABLES, "start": "*i64", **results, **NUMBERS},
            same | values | {"ROWS": 64 if pad <= 128 else 32, "TILE": 64 if pad <= 128 else 32},
            num_stages=stages,
        )  # fmt: skip
        if kv in ("bf16", "fp8e5"):
            yield case(
                f"metric {name}", _accumulate,
                {
                    "query": f"*{q}", "arena_k": f"*{kv}", "lse": "*fp32", "metric": "*fp32",
                    "tracked": "*i32", **TABLES, **NUMBERS,
                },
                split,
            )  # fmt: skip
    yield case(
        "merge", _merge,
        {"part": "*fp32", "part_lse": "*fp32", "out": "*bf16", "lse": "*fp32", "lines": "i32"},
        {"SPLITS": 17, "SPLITS_PAD": 32, "DV": 96, "DV_PAD": 128},
    )  # fmt: skip


def case(name: str, kernel, signature: dict, constants: dict, **options) -> tuple:
    """A case as compiled.py takes it, the kernel's parameters in their order."""
    types = signature | dict.fromkeys(constants, "constexpr")
    ordered = {parameter: types[parameter] for parameter in kernel.arg_names}
    return name, kernel, ordered, constants, {"num_warps": 4, **options}
