"""The code of each number in a floating-point format of 8 or 4 bits (exercise 6.1)."""

from __future__ import annotations

import torch

from utils.formats import ELEMENTS


def encode(x: torch.Tensor, format: str) -> torch.Tensor:
    """The code of each number of ``x``: that of the nearest number of the format, and the even one of two equally near.

    With e exponent bits, f fraction bits and a bias, the code ``s E F`` (1 bit, e bits, f bits) stands for
    ``(-1)^s 2^(E - bias) (1 + F / 2^f)``, or for ``(-1)^s 2^(1 - bias) F / 2^f`` where E is 0 (OCP 8-bit floating point
    specification, 2023; e2m1: OCP microscaling formats specification, 2023, section 5.3.3).

    Args:
        x: any shape and strides, float32, float16 or bfloat16.
        format: ``"e4m3"`` or ``"e2m1"``.

    Returns:
        uint8 of the shape of ``x``, the code in the low bits. A number beyond the largest one of the format, or
        infinity, gets the code of the largest one. A NaN gets a code with ones in all bits below the sign. The sign bit
        is that of ``x``, for zeros too.

    Raises:
        TypeError: ``x`` is not a tensor of floating-point numbers.
        ValueError: the format is another, or ``x`` holds a NaN and the format has none.
    """
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        raise TypeError(f"x must be a tensor of floating-point numbers, got {getattr(x, 'dtype', type(x).__name__)}")
    if format not in ("e4m3", "e2m1"):
        raise ValueError(f"format must be 'e4m3' or 'e2m1', got {format!r}")
    fmt = ELEMENTS[format]  # has bits, exponent_bits, fraction_bits, bias, min_exponent = 1 - bias, largest, has_nan
    x = x.float()
    if not fmt.has_nan and bool(x.isnan().any()):
        raise ValueError(f"{format} has no code for NaN, and x holds {int(x.isnan().sum())} of {x.numel()}")
    ### BEGIN SOLUTION 6.1: the codes
    magnitude = x.abs().nan_to_num(nan=0.0).clamp(max=fmt.largest)
    normal = magnitude.clamp(min=2.0**fmt.min_exponent)  # subnormal numbers and zero lie as close as the least normal
    exponent = torch.frexp(normal).exponent - 1  # frexp takes the significand from 1/2 to 1
    gaps = torch.ldexp(magnitude, fmt.fraction_bits - exponent).round().int()  # exact, then halves to even
    # Codes number the magnitudes from 0 on: 2^f of them for each exponent below this one, then so many gaps. Where
    # rounding carries into the next exponent, the sum does too.
    code = ((exponent - fmt.min_exponent) << fmt.fraction_bits) + gaps
    sign = 1 << (fmt.bits - 1)
    code = torch.where(x.isnan(), sign - 1, code)
    return (code + sign * torch.signbit(x)).to(torch.uint8)
    ### END SOLUTION
