"""How much a format loses: over the magnitude of a number, and of a whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from utils.formats.elements import as_float32, decode, encode
from utils.formats.quantized import quantize

#: Numbers tried around each magnitude.
_SAMPLES = 256


def rounding_error(magnitudes: Tensor, format: str) -> Tensor:
    """Relative error of rounding to an element format, near each magnitude; float32 of the shape of ``magnitudes``.

    It is the root mean square of ``(rounded - x) / x`` over numbers ``x`` spread evenly over one octave, from
    ``magnitude / sqrt(2)`` to ``magnitude * sqrt(2)`` on a logarithmic scale. It is 1 where all of them round to zero,
    and approaches 1 far above the largest number.

    Args:
        magnitudes: (P,) positive, floating point.
        format: a name of :data:`utils.formats.ELEMENTS`.

    Raises:
        TypeError, ValueError: as :func:`utils.formats.encode`, or a magnitude that is not above 0.
    """
    centres = as_float32(magnitudes)
    if not bool((centres > 0).all()):
        raise ValueError(f"magnitudes must be above 0, got {float(centres.min())}")
    octave = torch.exp2((torch.arange(_SAMPLES, device=centres.device) + 0.5) / _SAMPLES - 0.5)
    x = centres.unsqueeze(-1) * octave
    return ((decode(encode(x, format), format) - x) / x).square().mean(-1).sqrt()


def quantization_error(x: Tensor, format: str, block: int | None = None) -> float:
    """Norm of what :func:`utils.formats.quantize` changes over the norm of ``x``; 0 for a tensor of zeros.

    Raises:
        TypeError, ValueError: as :func:`utils.formats.quantize`.
    """
    kept = quantize(x, format, block).dequantize().double()
    size = float(x.double().norm())
    return float((kept - x.double()).norm()) / size if size else 0.0
