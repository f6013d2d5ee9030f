"""What of `compact` and `move` is compiled for GPUs that are not there."""

from __future__ import annotations

from collections.abc import Iterator

from kvc_kernels.gpu.compact import _compact_kernel, _move_kernel, _rows

from tests.kernels.gpu.cases_attention import case


def cases(architecture: int) -> Iterator[tuple]:
    """Words of 8 bytes in a key and a value: types do not matter, only how many bytes there are."""
    del architecture  # the same on all: no instruction here is younger than any of them
    for layers_heads, page, words, words_v, slots in (
        (4, 8, 2, 2, "i32"),  # D=16 fp8
        (256, 16, 32, 32, "i32"),  # D=128 bf16
        (256, 64, 64, 16, "i64"),  # D=256 bf16, Dv=128 fp8
        (1025, 32, 24, 24, "i32"),  # D=96 bf16
        (96, 64, 128, 128, "i64"),  # D=256 fp32
    ):
        width, width_v = (1 << (n - 1).bit_length() for n in (words, words_v))
        constants = {
            "PER_BLOCK": layers_heads,
            "ALL_HEADS": 1 << (layers_heads - 1).bit_length(),
            "P": page,
            "ROWS": _rows(page, max(width, width_v)),
            "WORDS": words,
            "WIDTH": width,
            "WORDS_V": words_v,
            "WIDTH_V": width_v,
        }
        signature = dict.fromkeys(_compact_kernel.arg_names[:6], "*i64")
        signature["source_slots"] = f"*{slots}"
        name = f"compact {slots} slots, L*H {layers_heads}, P {page}, words {words} and {words_v}"
        yield case(name, _compact_kernel, signature, constants)
    for word, page, words in (("i64", 16, 32), ("i64", 64, 24), ("i32", 16, 1), ("i32", 64, 1)):
        width = 1 << (words - 1).bit_length()
        constants = {
            "PER_BLOCK": 256,
            "P": page,
            "ROWS": _rows(page, width),
            "WORDS": words,
            "WIDTH": width,
        }
        signature = {"arena": f"*{word}"} | dict.fromkeys(_move_kernel.arg_names[1:4], "*i64")
        yield case(f"move {word}, P {page}, words {words}", _move_kernel, signature, constants)
