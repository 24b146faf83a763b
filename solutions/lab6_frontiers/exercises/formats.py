"""The codes of e4m3 and e2m1 by their definition, number by number: what an encoder is held against.

The right code is found in the list of all numbers of a format, as the nearest one, and not by the arithmetic that the
exercise asks for. The known mistakes change what is taken from that list.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

Tensor = torch.Tensor
#: Name -> exponent bits, fraction bits, bias, and how many codes without sign stand for finite numbers.
_FORMATS = {"e4m3": (4, 3, 7, 127), "e2m1": (2, 1, 1, 8)}
FORMATS = tuple(_FORMATS)


@functools.cache
def numbers(format: str) -> Tensor:
    """The finite numbers of the codes without sign, from 0 up, float64."""
    _, fraction, bias, count = _FORMATS[format]
    found = []
    for code in range(count):
        field, rest = divmod(code, 2**fraction)
        share = rest / 2**fraction
        found.append(2.0 ** (field - bias) * (1 + share) if field else 2.0 ** (1 - bias) * share)
    return torch.tensor(found, dtype=torch.float64)


def fraction_bits(format: str) -> int:
    """Bits of the fraction field."""
    return _FORMATS[format][1]


def least_normal(format: str) -> float:
    """The smallest number with an exponent field above 0."""
    return 2.0 ** (1 - _FORMATS[format][2])


def sign_bit(format: str) -> int:
    """The code of minus zero."""
    exponent, fraction, _, _ = _FORMATS[format]
    return 2 ** (exponent + fraction)


@dataclass(frozen=True)
class Encoding:
    """How numbers become codes: as they should, or with mistakes.

    Attributes:
        ties: to which of two equally near numbers: ``"even"``, ``"up"`` (away from zero) or ``"down"``.
        truncated: every number becomes the next one towards zero.
        flushed: what is below the least normal number becomes 0.
        carried: where a fraction that is rounded up to a whole raises the exponent (elsewhere it becomes 0):
            ``"always"``, ``"never"``, or ``"below"`` the least normal number only.
        shifted: how many exponents the result is off.
        zero_sign: whether minus zero keeps its sign.
        twos_complement: negative numbers as integers store them.
        sign_at: place of the sign's bit, instead of the one above the exponent field.
    """

    ties: str = "even"
    truncated: bool = False
    flushed: bool = False
    carried: str = "always"
    shifted: int = 0
    zero_sign: bool = True
    twos_complement: bool = False
    sign_at: int | None = None

    def __call__(self, x: Tensor, *, format: str) -> Tensor:
        """uint8 codes of the shape of ``x``, on the CPU."""
        x, values = x.detach().double().cpu().contiguous(), numbers(format)
        magnitude, sign = x.abs().nan_to_num(nan=0.0), sign_bit(format)
        lower = (torch.searchsorted(values, magnitude, right=True) - 1).clamp(max=len(values) - 1)
        upper = (lower + 1).clamp(max=len(values) - 1)
        middle = (values[lower] + values[upper]) / 2
        up = (magnitude > middle) | ((magnitude == middle) & self._takes_upper(lower))
        code = torch.where(up & (not self.truncated), upper, lower)
        whole = 2 ** fraction_bits(format)
        if self.carried != "always":
            lost = (code > lower) & (code % whole == 0) & ((self.carried == "never") | (lower >= whole))
            code = torch.where(lost, code - whole, code)
        if self.flushed:
            code = torch.where(magnitude < least_normal(format), 0, code)
        code = torch.where(x.isnan(), sign - 1, code + self.shifted * whole)
        negative = torch.signbit(x) if self.zero_sign else x < 0
        if self.twos_complement:
            return torch.where(negative, (2 * sign - code) % (2 * sign), code).to(torch.uint8)
        return (code + negative * (sign if self.sign_at is None else 2**self.sign_at)).to(torch.uint8)

    def _takes_upper(self, lower: Tensor) -> Tensor:
        """Of numbers in the middle between two, which become the upper one."""
        if self.ties == "even":
            return lower % 2 == 1
        return torch.full_like(lower, self.ties == "up", dtype=torch.bool)


encoded = Encoding()


def encoded_by_exponent(x: Tensor, *, format: str, off: int, least_first: bool) -> Tensor:
    """What the arithmetic of the exercise gives if the exponent is ``off`` in both of its counts.

    Args:
        x: any shape, any floating dtype.
        format: a key of ``_FORMATS``.
        off: by how much.
        least_first: whether the magnitude is raised to the least normal number before its exponent is taken, or the
            exponent, once it is off, to that number's.

    Returns:
        uint8 codes of the shape of ``x``, on the CPU.
    """
    x, least, fraction = x.detach().double().cpu(), least_normal(format), fraction_bits(format)
    magnitude = x.abs().nan_to_num(nan=0.0).clamp(max=numbers(format)[-1].item())
    exponent = torch.frexp(magnitude.clamp(min=least) if least_first else magnitude).exponent - 1 + off
    lowest = 1 - _FORMATS[format][2]
    if not least_first:
        exponent = torch.where(magnitude > 0, exponent, lowest).clamp(min=lowest)
    code = (exponent - lowest) * 2**fraction + torch.ldexp(magnitude, fraction - exponent).round().int()
    code = torch.where(x.isnan(), sign_bit(format) - 1, code)
    return (code + sign_bit(format) * torch.signbit(x)).to(torch.uint8)
