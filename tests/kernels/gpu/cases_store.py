"""What of `store` is compiled for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Iterator

from kvc_kernels.gpu.store import _store_kernel

from tests.kernels.gpu.cases_attention import case

SIZES = ["k_block", "v_block", "metric_block", "key_token", "key_head", "value_token", "value_head"]


def cases(architecture: int) -> Iterator[tuple]:
    """Casts there may be, and the head dimensions."""
    for new, cache, dim, dim_v, page, heads, metric in (
        ("bf16", "bf16", 128, 128, 16, 8, True),
        ("bf16", "bf16", 256, 128, 64, 4, False),
        ("fp16", "fp16", 64, 64, 32, 8, True),
        ("fp32", "fp32", 96, 96, 8, 3, True),
        ("fp32", "fp32", 16, 16, 8, 2, False),
        ("bf16", "fp8e5", 128, 128, 16, 8, False),
        ("bf16", "fp8e4nv", 128, 128, 16, 8, True),
        ("fp16", "fp8e4nv", 96, 64, 64, 1, False),
        ("fp32", "fp8e4nv", 32, 32, 8, 2, False),
        ("u8", "u8", 128, 128, 16, 8, True),
    ):
        if cache == "fp8e4nv" and architecture < 89:
            continue
        signature = {"layer_k": f"*{cache}", "layer_v": f"*{cache}", "slots": "*i64"}
        signature |= {"keys": f"*{new}", "values": f"*{new}"} | dict.fromkeys(SIZES, "i32")
        constants = {
            "H": heads,
            "P": page,
            "D": dim,
            "DV": dim_v,
            "HEADS": 1 << (heads - 1).bit_length(),
            "WIDTH": 1 << (dim - 1).bit_length(),
            "WIDTH_V": 1 << (dim_v - 1).bit_length(),
        }
        if metric:
            signature["layer_metric"] = "*fp32"
        else:
            constants["layer_metric"] = None
        name = f"store {new} to {cache}, D {dim} and {dim_v}, P {page}, H {heads}"
        yield case(name, _store_kernel, signature, constants)
