"""Codes of 4 bits out of packed halfwords, in registers."""

from __future__ import annotations

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip

# Four nibbles of two halfwords in one register: (w >> 4 j) & 0x000f000f | magic is a pair of the numbers 128 + code in
# bfloat16 (1024 + code in float16), whose last fraction bits the nibble has become. A subtraction of 128 + 8, here as a
# multiply-add since Ampere has no other on pairs of bfloat16, leaves the code: 11 instructions for 8 codes.
UNPACK = """
{{
.reg .b32 one, minus, s1, s2, s3, t0, t1, t2, t3;
mov.b32 one, {one};
mov.b32 minus, {minus};
shr.b32 s1, $4, 4;
shr.b32 s2, $4, 8;
shr.b32 s3, $4, 12;
lop3.b32 t0, $4, 0x000f000f, {magic}, 0xEA;
lop3.b32 t1, s1, 0x000f000f, {magic}, 0xEA;
lop3.b32 t2, s2, 0x000f000f, {magic}, 0xEA;
lop3.b32 t3, s3, 0x000f000f, {magic}, 0xEA;
fma.rn.{pair} $0, t0, one, minus;
fma.rn.{pair} $1, t1, one, minus;
fma.rn.{pair} $2, t2, one, minus;
fma.rn.{pair} $3, t3, one, minus;
}}
"""
UNPACK_BF16 = tl.constexpr(UNPACK.format(pair="bf16x2", magic="0x43004300", one="0x3F803F80", minus="0xC308C308"))
UNPACK_FP16 = tl.constexpr(UNPACK.format(pair="f16x2", magic="0x64006400", one="0x3C003C00", minus="0xE408E408"))


@triton.jit
def unpack_nibbles(halfwords, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The codes in four nibbles of each halfword, less 8, as four tensors of ``dtype``; exact."""
    if ASSEMBLY:
        if dtype == tl.bfloat16:
            codes = tl.inline_asm_elementwise(
                UNPACK_BF16, "=r,=r,=r,=r,r", [halfwords],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            codes = tl.inline_asm_elementwise(
                UNPACK_FP16, "=r,=r,=r,=r,r", [halfwords],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        w = halfwords.to(tl.int32)
        codes = (
            ((w & 15) - 8).to(dtype),
            (((w >> 4) & 15) - 8).to(dtype),
            (((w >> 8) & 15) - 8).to(dtype),
            (((w >> 12) & 15) - 8).to(dtype),
        )
    return codes
