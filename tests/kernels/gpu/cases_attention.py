"""Decode and extend, for every cache type and head dim."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kvc_kernels.cache import KVCache, Spans
from kvc_kernels.gpu.decode import _decode, _merge, constants_of, tile_of
from kvc_kernels.gpu.extend import _extend
from kvc_kernels.gpu.metric import _accumulate
from kvc_kernels.gpu.schedule import LEAST, ROW_COST, _schedule

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
TYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn,
}  # fmt: skip
TABLES = {
    "req_to_token": "*i32", "begin": "*i32", "first": "*i32", "count": "*i32", "stride": "*i32",
    "request": "*i64", "seq_len": "*i64",
}  # fmt: skip
NUMBERS = {"scale": "fp32", "layer": "i32", "context": "i32", "query_stride": "i32"}
#: Of the kernels that go by a schedule.
SCHEDULE = {"heads": "*i32", "blocks": "*i32", "cuts": "*i32"}
SCHEDULED = {"scale": "fp32", "layer": "i32", "rows": "i32", "width": "i32", "query_stride": "i32"}
LAYERS, HEADS = 32, 8


def cases(architecture: int) -> Iterator[tuple]:
    for q, kv, dim, page, group in SHAPES:
        if kv == "fp8e4nv" and architecture < 89:
            continue
        pad = 1 << (dim - 1).bit_length()
        name = f"{q} over {kv}, D {dim}, P {page}, G {group}"
        same = {
            "HEADS": HEADS, "PER_BLOCK": LAYERS * HEADS, "P": page, "GROUP": group, "D": dim,
            "D_PAD": pad,
        }  # fmt: skip
        caches = {"query": f"*{q}", "arena_k": f"*{kv}", "arena_v": f"*{kv}"}
        results = {"out": f"*{q}", "lse": "*fp32"}
        yield decode_case(f"decode {name}", q, kv, dim, page, group)
        for prefix in (False, True):
            yield case(
                f"{'prefix' if prefix else 'extend'} {name}", _extend,
                {**caches, **TABLES, "start": "*i64", "chosen": "*i64", **results, **NUMBERS},
                {
                    **same, "DV": dim, "DV_PAD": pad, "UPCAST": False, "PREFIX": prefix,
                    "ROWS": 64 if pad <= 128 else 32, "TILE": 64 if pad <= 128 else 32,
                },
                num_stages=3 if pad <= 128 else 2,
            )  # fmt: skip
        if kv in ("bf16", "fp8e5"):
            yield case(
                f"metric {name}", _accumulate,
                {
                    "query": f"*{q}", "arena_k": f"*{kv}", "lse": "*fp32", "metric": "*fp32",
                    "tracked": "*i32", "request": "*i64", **SCHEDULE, **SCHEDULED,
                },
                {**same, "GROUP_PAD": 16, "TILE": tile_of(cache(kv, dim, page)),
                 "INTERPRETED": False},
            )  # fmt: skip
    line = {"starts": "*i32", "cuts": "*i32"}
    yield case(
        "merge", _merge,
        {
            "part": "*fp32", "part_lse": "*fp32", **line, "out": "*bf16", "lse": "*fp32",
            "layer": "i32", "rows": "i32", "programs": "i32",
        },
        {"GROUP": 4, "DV": 96, "DV_PAD": 128, "COST": ROW_COST, "LEAST": LEAST, "AT_ONCE": 16},
        num_warps=1,
    )  # fmt: skip
    yield case(
        "schedule", _schedule,
        {
            **TABLES, "heads": "*i32", "blocks": "*i32", **line,
            "rows": "i32", "context": "i32", "width": "i32", "programs": "i32",
        },
        {
            "LAYERS": LAYERS, "HEADS": HEADS, "PER_BLOCK": LAYERS * HEADS, "P": 16, "TILE": 32,
            "COST": ROW_COST, "LEAST": LEAST, "AT_ONCE": 1024,
        },
        num_warps=8,
    )  # fmt: skip


def cache(kv: str, dim: int, page: int) -> KVCache:
    """An arena of no blocks: what is compiled depends on its shape and type."""
    arena = torch.empty(0, LAYERS, HEADS, page, dim, dtype=TYPES[kv])
    rows = torch.zeros(1, page, dtype=torch.int32)
    return KVCache(arena, arena, rows, Spans.uncompressed(1, LAYERS * HEADS, "cpu"))


def decode_case(name: str, q: str, kv: str, dim: int, page: int, group: int) -> tuple:
    """What the launcher compiles for such a cache, with its query's rows aligned to 16 bytes."""
    of = cache(kv, dim, page)
    constants = constants_of(of, HEADS * group, tile_of(of)) | {"INTERPRETED": False}
    read = "*i16" if "fp8" in kv else f"*{kv}"
    types = {
        "query": f"*{q}", "arena_k": read, "arena_v": read, **SCHEDULE, "out": f"*{q}",
        "lse": "*fp32", "part": "*fp32", "part_lse": "*fp32", **SCHEDULED,
    }  # fmt: skip
    options = {each: constants.pop(each) for each in ("num_warps", "maxnreg")}
    return case(name, _decode, types, constants, **options)


def case(name: str, kernel, signature: dict, constants: dict, **options) -> tuple:
    """A case as compiled.py takes it, the kernel's parameters in their order."""
    types = signature | dict.fromkeys(constants, "constexpr")
    ordered = {parameter: types[parameter] for parameter in kernel.arg_names}
    return name, kernel, ordered, constants, {"num_warps": 4, **options}
