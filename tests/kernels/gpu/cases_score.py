"""Log-sum-exp, window attention and smoothing, for every cache type and head dim, as launched."""

from __future__ import annotations

from collections.abc import Iterator

from kvc_kernels.gpu.neighbours import _TILE, _smooth
from kvc_kernels.gpu.score import _lse, _window_attention
from kvc_kernels.gpu.windows import COLUMNS

from tests.kernels.gpu.cases_attention import case

#: Query and cache type, head dim, page size, query group, rows a tile, group mean?
SHAPES = [
    ("bf16", "bf16", 128, 16, 4, 32, False),
    ("bf16", "bf16", 128, 64, 7, 64, True),
    ("fp16", "fp16", 64, 8, 1, 16, False),
    ("fp16", "fp16", 96, 32, 16, 64, True),
    ("bf16", "bf16", 256, 64, 8, 32, False),
    ("fp32", "fp32", 256, 16, 2, 16, True),
    ("bf16", "fp8e5", 128, 16, 8, 64, False),
    ("bf16", "fp8e4nv", 128, 16, 4, 64, True),
]
NUMBERS = {"log2_scale": "fp32", "n": "i32", "window": "i32"}
STRIDES = dict.fromkeys(
    ("query_stride", "query_head_stride", "block_stride", "head_stride", "token_stride"), "i32"
)


def cases(architecture: int) -> Iterator[tuple]:
    for q, kv, dim, page, group, rows, mean in SHAPES:
        if kv == "fp8e4nv" and architecture < 89:
            continue
        pad = 1 << (dim - 1).bit_length()
        name = f"{q} over {kv}, D {dim}, P {page}, G {group}"
        same = {
            "GROUP": group, "P": page, "D": dim, "D_PAD": pad, "UPCAST": False, "ROWS": rows,
            "TILE": 16 if q == "fp32" and dim == 256 else 64,
        }  # fmt: skip
        tensors = {"queries": f"*{q}", "layer_k": f"*{kv}", "slots": "*i32", **NUMBERS, **STRIDES}
        yield case(f"window lse {name}", _lse, {"part": "*fp32", "share": "i32", **tensors}, same)
        of_scores = {
            "scores": "*fp32", "lse": "*fp32", "excluded": "i32",
            "lse_stride": "i32", "lse_head_stride": "i32",
        }  # fmt: skip
        padded = 1 << (group - 1).bit_length() if mean else group
        constants = {"GROUP_PAD": padded, "MEAN": mean, "POWER": 2 - mean, "COLUMNS": COLUMNS}
        one, several = {"prompts": None}, {"prompts": "*i64"}
        name = f"window attention {name}, {'mean' if mean else 'sum'}"
        yield case(name, _window_attention, of_scores | tensors, same | constants | one)
        yield case(
            f"{name}, several prompts", _window_attention, of_scores | tensors | several,
            same | constants,
        )  # fmt: skip
    yield from smoothing()


def smoothing() -> Iterator[tuple]:
    """Pooled, faded, or both; of one prompt or several."""
    signature = dict.fromkeys(("n", "own", "row", "pool", "reach"), "i32")
    signature |= {"out": "*fp32", "scores": "*fp32", "slope": "i64", "half_lives": "*fp64"}
    for how, fades in ((1, False), (2, False), (0, True), (2, True)):
        constants = {"HOW": how, "FADES": fades, "COLUMNS": COLUMNS, "TILE": _TILE}
        name = f"smooth {how}{', fades' if fades else ''}"
        yield case(name, _smooth, signature, constants | {"prompts": None})
        yield case(f"{name}, several prompts", _smooth, signature | {"prompts": "*i64"}, constants)
