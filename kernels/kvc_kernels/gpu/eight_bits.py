"""Caches of 8-bit floats in kernels: two numbers at a time, as one of 16 bits.

Neighbours of a row, numbers 2i and 2i + 1, are read as one int16: copies, shared memory and the
loads of matrix operands are then those of a 16-bit cache, and two or four instructions on a
register of two such make fp16 of the even and of the odd numbers. A dot product over D is the sum
of two over D / 2; what weighs values has an even and an odd half. (Triton's own conversions of fp8
operands take values through shared memory number by number.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: What `KIND` is, by the cache's type: "" for 16 and 32 bits.
_KINDS = {torch.float8_e5m2: "e5m2", torch.float8_e4m3fn: "e4m3"}

_E5M2 = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x2404;
    and.b32 $1, $2, 0xFF00FF00;
}""")
_E4M3 = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 first, second;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    prmt.b32 $0, first, second, 0x5410;
    prmt.b32 $1, first, second, 0x7632;
}""")


def kind_of(dtype: torch.dtype) -> str:
    """`KIND` of a cache of this type."""
    return _KINDS.get(dtype, "")


def as_pairs(arena: torch.Tensor) -> torch.Tensor:
    """`arena` as kernels take it: its own numbers, or int16 [..., D / 2] of 8-bit ones."""
    return arena.view(torch.int16) if arena.dtype in _KINDS else arena


@triton.jit
def halves(pairs, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """The even and the odd numbers of `pairs` (int16), in fp16, which holds all of either type."""
    if INTERPRETED:  # it has no assembler
        even, odd = pairs << 8, pairs & -256
        if KIND == "e4m3":
            even = _fp16_of_e4m3(even)
            odd = _fp16_of_e4m3(odd)
        else:
            even, odd = even.to(tl.float16, bitcast=True), odd.to(tl.float16, bitcast=True)
    else:
        even, odd = tl.inline_asm_elementwise(
            _E4M3 if KIND == "e4m3" else _E5M2, "=r,=r,r", [pairs],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def _fp16_of_e4m3(high):
    """Of numbers in the high byte of int16; as fp16 the same exponent is one of 2^-8 as much."""
    moved = (high & -32768) | ((high >> 1) & 0x3F80)
    return moved.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def split_columns(rows, KIND: tl.constexpr):
    """Even and odd columns of `rows`, in fp16; for a cache of wider numbers `rows` twice."""
    if KIND == "":
        even, odd = rows, rows
    else:
        pairs = tl.reshape(rows.to(tl.float16), [rows.shape[0], rows.shape[1] // 2, 2])
        even, odd = tl.split(pairs)
    return even, odd
