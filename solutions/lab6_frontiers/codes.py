"""From numbers on chip to codes of 8 bits and their scales, to the bit as :func:`utils.formats.quantize` gives them."""

from __future__ import annotations

import torch

from utils import runtime
from utils.formats import ELEMENTS

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: Formats whose codes a kernel writes, one in a byte.
KERNEL_FORMATS = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5, "int8": tl.int8}


@triton.jit
def scaled_codes(y, amax, LARGEST: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of ``y`` and the scale that maps ``amax`` to the largest number of the format; amax broadcasts to y.

    The quotients are those of PyTorch on a CPU, rounded to nearest. A division for each number would take longer than
    its traffic; a product with the reciprocal in float64 gives the same: it is off by 2^-52 of itself at most, and no
    quotient of two float32 numbers comes as near to the middle between two others, where rounding changes.
    """
    scale = tl.div_rn(amax, LARGEST)
    reciprocal = 1 / tl.where(scale > 0, scale, 1.0).to(tl.float64)
    ratio = tl.where(scale > 0, (y.to(tl.float64) * reciprocal).to(tl.float32), 0.0)
    ratio = tl.minimum(tl.maximum(ratio, -LARGEST), LARGEST)  # a scale of few bits, below 2^-126, leaves more
    if DTYPE.is_int():  # above 2^23 float32 has no fractions left: adding and subtracting rounds half to even
        ratio = (ratio + 12582912.0) - 12582912.0
    return ratio.to(DTYPE), scale


def check_format(format: str) -> None:
    """Refuse a format that the kernels do not write, on any GPU or on this one.

    Raises:
        ValueError: with the formats that they do write.
    """
    if format not in KERNEL_FORMATS:
        raise ValueError(f"format must be one of {', '.join(KERNEL_FORMATS)}, got {format!r} (quantize has the others)")
    old = not runtime.INTERPRET and torch.cuda.get_device_capability(runtime.DEVICE) < (8, 9)
    if old and ELEMENTS[format].dtype != torch.int8:
        raise ValueError(f"{format} needs compute capability 8.9 (Ada, Hopper); this GPU can write int8")
