"""Log-sum-exp and window attention, for every cache type and head dim, tiles as launched."""

from __future__ import annotations

from collections.abc import Iterator

from kvc_kernels.gpu.score import _lse, _window_attention

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
        yield case(
            f"window attention {name}, {'mean' if mean else 'sum'}", _window_attention,
            of_scores | tensors, same | {"GROUP_PAD": padded, "MEAN": mean, "POWER": 2 - mean},
        )  # fmt: skip
