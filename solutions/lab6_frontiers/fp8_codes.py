"""e4m3 in kernels: codes to numbers and back, and powers of two.

``NATIVE`` says that the hardware has the type (from compute capability 8.9 on). Without it codes are bytes, and their
bits are moved by hand.
"""

from __future__ import annotations

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def widen(codes, NATIVE: tl.constexpr):
    """Codes as float16; without ``NATIVE`` as numbers 256 times too small, and NaN as 480 / 256.

    The bits of an e4m3 number, moved to the top, are that number in float16 but for the exponents' bias, 15 and not 7.
    """
    if NATIVE:
        numbers = codes.to(tl.float16)
    else:
        wide = codes.to(tl.uint16)
        numbers = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return numbers


@triton.jit
def narrow(x, NATIVE: tl.constexpr):
    """Codes of float32 numbers of magnitudes up to 448, rounded to the nearest, ties to the even code."""
    if NATIVE:
        codes = x.to(tl.float8e4nv)
    else:
        bits = tl.abs(x).to(tl.int32, bitcast=True)
        # Normal numbers: 20 of 23 fraction bits are rounded away, and the bias goes from 127 to 7.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Subnormal ones are multiples of 2^-9, which is the step between neighbours at 2^14: the sum rounds.
        subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        magnitude = tl.where(bits < 0x3C800000, subnormal, normal)  # below 2^-6
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        codes = (tl.where(x == x, magnitude, 0x7F) | sign).to(tl.uint8)
    return codes


@triton.jit
def power_below(x):
    """The power of two at or below a positive float32, by clearing its fraction; 1 for 0."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power > 0, power, 1.0)


@triton.jit
def inverse_of_power(x):
    """1 / x of a power of two from 2^-126 to 2^126, exactly."""
    return (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
