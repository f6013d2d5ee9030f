"""Caches of 8-bit floats in kernels: two numbers at a time, as one of 16 bits.

Neighbours of a row, numbers 2i and 2i + 1, are read as one int16: copies, shared memory and the
loads of matrix operands are then those of a 16-bit cache, and a few bit operations on a register of
two such make fp16 of the even and of the odd numbers. A dot product over D is the sum of two over
D / 2; what weighs values has an even and an odd half. (Compilers' own conversions of fp8 operands
take values through shared memory number by number.)

fp16 of e4m3 has the exponent as it is, which is 2^-8 of the number: exact, and made up for once.
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
    .reg .b32 even, moved;
    shl.b32 even, $2, 8;
    shr.b32 moved, even, 1;
    and.b32 moved, moved, 0x3F803F80;
    lop3.b32 $0, even, 0x80008000, moved, 0xEA;
    shr.b32 moved, $2, 1;
    and.b32 moved, moved, 0x3F803F80;
    lop3.b32 $1, $2, 0x80008000, moved, 0xEA;
}""")


def kind_of(dtype: torch.dtype) -> str:
    """`KIND` of a cache of this type."""
    return _KINDS.get(dtype, "")


def as_pairs(arena: torch.Tensor) -> torch.Tensor:
    """`arena` as kernels take it: its own numbers, or int16 [..., D / 2] of 8-bit ones."""
    return arena.view(torch.int16) if arena.dtype in _KINDS else arena


@triton.jit
def halves(pairs, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp16 of the even and of the odd numbers of `pairs` (int16); of e4m3 2^-8 of them."""
    if INTERPRETED:
        even, odd = pairs << 8, pairs & -256
        if KIND == "e4m3":
            even = (even & -32768) | ((even >> 1) & 0x3F80)
            odd = (odd & -32768) | ((odd >> 1) & 0x3F80)
        return even.to(tl.float16, bitcast=True), odd.to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(
        _E4M3 if KIND == "e4m3" else _E5M2, "=r,=r,r", [pairs],
        dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def split_columns(rows, KIND: tl.constexpr):
    """Even and odd columns of `rows`, in fp16; for a cache of wider numbers `rows` twice."""
    if KIND == "":
        return rows, rows
    pairs = tl.reshape(rows.to(tl.float16), [rows.shape[0], rows.shape[1] // 2, 2])
    return tl.split(pairs)
