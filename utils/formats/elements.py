"""Element formats: what each code of 8 or 4 bits means, and which code a number gets.

Sources: e4m3 and e5m2 are those of the OCP 8-bit floating point specification (OFP8, Open Compute Project 2023), e2m1
is that of the OCP microscaling formats specification, version 1.0 (MX, Open Compute Project 2023, section 5.3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class ElementFormat:
    """A signed number of few bits.

    The bits below the sign hold an exponent field ``E`` and a fraction ``F`` of ``fraction_bits`` bits. They mean
    ``2^(E - bias) * (1 + F / 2^fraction_bits)``, or ``2^(1 - bias) * F / 2^fraction_bits`` where ``E`` is 0 (a
    subnormal number). An integer is the case without an exponent field: all of its codes are subnormal, and its bias
    makes the step between neighbours 1. Integers store negative numbers in two's complement, floats have a sign bit.
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    bias: int
    #: Largest finite number; larger ones and infinity are encoded as this.
    largest: float
    #: PyTorch's dtype of one code per byte, or None for a format of 4 bits.
    dtype: torch.dtype | None = None
    has_nan: bool = False
    has_infinity: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code, with its sign."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def is_integer(self) -> bool:
        """Whether negative numbers are in two's complement."""
        return self.exponent_bits == 0

    @property
    def min_exponent(self) -> int:
        """Exponent of the subnormal numbers and of the smallest normal ones."""
        return 1 - self.bias


#: By name. The most negative integers, -128 and -8, can be decoded, but no number is encoded as them.
ELEMENTS = {
    each.name: each
    for each in (
        ElementFormat("e4m3", 4, 3, 7, 448.0, torch.float8_e4m3fn, has_nan=True),
        ElementFormat("e5m2", 5, 2, 15, 57344.0, torch.float8_e5m2, has_nan=True, has_infinity=True),
        ElementFormat("e2m1", 2, 1, 1, 6.0),
        ElementFormat("int8", 0, 7, -6, 127.0, torch.int8),
        ElementFormat("int4", 0, 3, -2, 7.0),
    )
}


def element_format(name: str) -> ElementFormat:
    """The element format of a name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in ELEMENTS:
        raise ValueError(f"format must be one of {', '.join(ELEMENTS)}, got {name!r}")
    return ELEMENTS[name]


def as_float32(x: Tensor) -> Tensor:
    """``x`` in float32, without its gradient.

    Raises:
        TypeError: ``x`` is not a tensor of floating-point numbers.
        ValueError: ``x`` is empty.
    """
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a tensor of floating-point numbers, got {got}")
    if x.numel() == 0:
        raise ValueError(f"x must hold at least one number, got shape {tuple(x.shape)}")
    return x.detach().float()


def encode(x: Tensor, format: str, stochastic: torch.Generator | None = None) -> Tensor:
    """The code of each number of ``x``, rounded to the nearest number of the format; a tie goes to the even code.

    With ``e`` the exponent of ``x``, or ``min_exponent`` where that is larger, the gap between neighbours around ``x``
    is ``2^(e - fraction_bits)``. Numbered from zero, the positive numbers of a format have the codes 0, 1, 2, ..., so
    the code of ``x`` is ``(e - min_exponent) * 2^fraction_bits + round(x / gap)``: the first term counts the gaps below
    the exponent of ``x``. Where rounding carries into the next exponent, the sum carries too.

    Args:
        x: any shape, floating point; rounded to float32 first, as PyTorch's own casts do.
        format: a name of :data:`ELEMENTS`.
        stochastic: draws which of the two neighbours a number between them becomes. The upper one has the probability
            ``(x - lower) / gap``, so that the result is right on average. It must be on the device of ``x``.

    Returns:
        uint8 codes of the shape of ``x``, between 0 and ``2^bits - 1``. A number beyond ``largest``, or infinity, gets
        the code of ``largest`` with its sign (the saturating mode of the OFP8 specification). NaN gets a code of all
        ones below the sign.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: ``x`` is empty, the format is unknown, or ``x`` holds a NaN and the format has none.
    """
    fmt = element_format(format)
    x = as_float32(x)
    nan = torch.isnan(x)
    if not fmt.has_nan and bool(nan.any()):
        raise ValueError(f"{format} has no code for NaN, and x holds {int(nan.sum())} of {x.numel()}")
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=fmt.largest).clamp(max=fmt.largest)
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=fmt.min_exponent)
    exponent = torch.where(magnitude > 0, exponent, fmt.min_exponent)  # frexp gives zero the exponent of 1/2
    gaps = torch.ldexp(magnitude, fmt.fraction_bits - exponent)  # exact: a power of two
    if stochastic is None:
        rounded = gaps.round()  # half to even
    else:
        drawn = torch.rand(gaps.shape, generator=stochastic, device=gaps.device)
        rounded = gaps.floor() + (drawn < gaps - gaps.floor())
    code = ((exponent - fmt.min_exponent) << fmt.fraction_bits) + rounded.int()
    half = 1 << (fmt.bits - 1)
    code = torch.where(nan, half - 1, code)
    negative = torch.signbit(x)
    code = torch.where(negative, -code % (2 * half) if fmt.is_integer else code + half, code)
    return code.to(torch.uint8)


@cache
def _table(name: str) -> Tensor:
    """The number of every code of a format, (2^bits,) float32, by the definition in :class:`ElementFormat`."""
    fmt = ELEMENTS[name]
    magnitude = torch.arange(1 << (fmt.bits - 1), dtype=torch.int32)
    field = magnitude >> fmt.fraction_bits
    significand = magnitude - (field << fmt.fraction_bits) + ((field > 0) << fmt.fraction_bits)
    value = torch.ldexp(significand.float(), field.clamp(min=1) - fmt.bias - fmt.fraction_bits)
    special = value > fmt.largest
    value[special] = torch.nan
    if fmt.has_infinity:
        value[int(special.int().argmax())] = torch.inf  # the first code above the largest number
    return torch.cat((value, value - len(value) if fmt.is_integer else -value))


def decode(codes: Tensor, format: str) -> Tensor:
    """The number of each code, float32, of the shape of ``codes``.

    Args:
        codes: uint8, any shape, one code in each element.
        format: a name of :data:`ELEMENTS`.

    Raises:
        TypeError: ``codes`` is not a uint8 tensor.
        ValueError: a code has more bits than the format, or the format is unknown.
    """
    fmt = element_format(format)
    if not isinstance(codes, Tensor) or codes.dtype != torch.uint8:
        got = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise TypeError(f"codes must be a uint8 tensor, got {got}")
    if codes.numel() and int(codes.max()) >> fmt.bits:
        raise ValueError(f"a code of {format} has {fmt.bits} bits, got {int(codes.max())}")
    return _table(format).to(codes.device)[codes.long()]


def grid(format: str) -> Tensor:
    """Every finite number that :func:`encode` can give, ascending, float32; zero once.

    Raises:
        ValueError: the format is unknown.
    """
    values = _table(element_format(format).name)
    return values[values.abs() <= ELEMENTS[format].largest].unique()


def pack(codes: Tensor) -> Tensor:
    """Codes of 4 bits, two to a byte, the first in the low half: uint8 (..., K) -> uint8 (..., K / 2).

    Raises:
        ValueError: the last axis is not even.
    """
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"the last axis must be even, as two codes share a byte, got shape {tuple(codes.shape)}")
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack`: uint8 (..., K / 2) -> uint8 (..., K)."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
