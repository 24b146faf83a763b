"""Tensors of few bits with scales: one for the tensor, one for each block of a row, or one for each block in 8 bits.

Sources: mxfp8 and mxfp4 follow the OCP microscaling formats specification, version 1.0 (MX, Open Compute Project 2023;
e8m0 is its section 5.4.1); nvfp4 follows NVIDIA's description ("Pretraining large language models with NVFP4", 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from utils.formats.elements import ELEMENTS, as_float32, decode, encode, pack, unpack


@dataclass(frozen=True)
class BlockFormat:
    """Elements in blocks of a fixed length, each block with a scale of 8 bits."""

    element: str
    block: int
    scale_dtype: torch.dtype


#: By name: mxfp8 and mxfp4 have powers of two as scales, nvfp4 has e4m3 numbers under one float32 of the tensor.
BLOCKS = {
    "mxfp8": BlockFormat("e4m3", 32, torch.float8_e8m0fnu),
    "mxfp4": BlockFormat("e2m1", 32, torch.float8_e8m0fnu),
    "nvfp4": BlockFormat("e2m1", 16, torch.float8_e4m3fn),
}
FORMATS = (*ELEMENTS, *BLOCKS)
#: e8m0 stores an exponent plus this, so that its smallest number is 2^-127; no float32 needs a larger one than 2^127.
_E8M0_BIAS = 127


@dataclass(frozen=True)
class Quantized:
    """A tensor (..., K) in few bits: each number is its element times the scale of its block.

    ``values`` holds the elements: float8_e4m3fn, float8_e5m2 or int8 of shape (..., K), or uint8 (..., K / 2) with two
    codes of 4 bits in a byte, the first in the low half. ``scales`` is (..., K / block): float32 in element formats,
    float8_e8m0fnu in mxfp8 and mxfp4, float8_e4m3fn in nvfp4. With one scale for the tensor it is () and ``block`` is
    None. ``tensor_scale`` is a float32 () that multiplies every scale of nvfp4, and None in other formats.
    """

    values: Tensor
    scales: Tensor
    format: str
    block: int | None = None
    tensor_scale: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The numbers again, (..., K) float32, on the device of ``values``."""
        element = _element(self.format)
        codes = unpack(self.values) if ELEMENTS[element].bits == 4 else self.values.view(torch.uint8)
        numbers, scales = decode(codes, element), self.scales.float()
        if self.tensor_scale is not None:
            scales = scales * self.tensor_scale
        if self.block is None:
            return numbers * scales
        return (numbers.unflatten(-1, (-1, self.block)) * scales.unsqueeze(-1)).flatten(-2)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements and of all scales."""
        tensors = (self.values, self.scales, self.tensor_scale)
        return sum(each.nbytes for each in tensors if each is not None)


def quantize(x: Tensor, format: str, block: int | None = None, stochastic: torch.Generator | None = None) -> Quantized:
    """``x`` in few bits: a scale for each block of the last axis, and elements that are ``x / scale``, rounded.

    The scale maps the largest magnitude of a block, ``amax``, to the end of the element's range:

    - element formats: ``amax / largest`` in float32;
    - mxfp8, mxfp4: ``2^(floor(log2(amax)) - emax)``, where ``emax`` is the exponent of ``largest`` (8 for e4m3, 2 for
      e2m1). Elements that are then still beyond ``largest`` saturate;
    - nvfp4: ``amax / 6`` over the tensor's scale, rounded to e4m3; the tensor's scale is the whole tensor's
      ``amax / (6 * 448)``.

    A block whose scale rounds to zero, as that of zeros, becomes zeros; mxfp8 and mxfp4 give zeros the smallest scale.

    Args:
        x: (..., K) floating point, finite; computed with in float32.
        format: a name of :data:`FORMATS`.
        block: numbers that share a scale, a divisor of K: 128 for groups of 128, K for a scale per row. By default one
            scale for the tensor, and in block formats their own length.
        stochastic: rounds the elements stochastically, as in :func:`utils.formats.encode`.

    Raises:
        TypeError: ``x`` is not floating point, or ``block`` is not an integer.
        ValueError: an unknown format, a block that does not divide K or is not the format's own, an odd K in a format
            of 4 bits, an empty ``x``, or one that holds NaN or infinity.
    """
    element = _element(format)
    x = as_float32(x)
    block = _checked_block(x, format, block)
    if ELEMENTS[element].bits == 4 and (x.ndim == 0 or x.shape[-1] % 2):
        raise ValueError(f"{format} needs an even last axis, as two codes share a byte, got shape {tuple(x.shape)}")
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(f"x must be finite in float32, and {bad} of its {x.numel()} numbers are not")
    groups = x.reshape(1, -1) if block is None else x.unflatten(-1, (-1, block))
    amax = groups.abs().amax(-1)
    scales, tensor_scale = _scales(amax, format, element)
    scale = scales.float() if tensor_scale is None else scales.float() * tensor_scale
    scale = scale.unsqueeze(-1)
    scaled = torch.where(scale > 0, groups / scale, 0.0)
    codes = encode(scaled, element, stochastic).reshape(x.shape)
    dtype = ELEMENTS[element].dtype
    values = pack(codes) if dtype is None else codes.view(dtype)
    return Quantized(values, scales if block else scales.reshape(()), format, block, tensor_scale)


def _element(format: str) -> str:
    """Name of the format that the elements are in."""
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    return BLOCKS[format].element if format in BLOCKS else format


def _checked_block(x: Tensor, format: str, block: int | None) -> int | None:
    """The block that counts: the format's own where it has one."""
    if block is not None and (isinstance(block, bool) or not isinstance(block, int)):
        raise TypeError(f"block must be an integer or None, got {block!r}")
    own = BLOCKS[format].block if format in BLOCKS else None
    if own is not None and block not in (None, own):
        raise ValueError(f"{format} has blocks of {own}, got block={block}")
    block = own or block
    if block is not None and (block < 1 or x.ndim == 0 or x.shape[-1] % block):
        raise ValueError(f"block must divide the last axis, got block={block} for shape {tuple(x.shape)}")
    return block


def _scales(amax: Tensor, format: str, element: str) -> tuple[Tensor, Tensor | None]:
    """The scales of blocks whose largest magnitudes are ``amax``, of its shape, and the tensor's own in nvfp4."""
    largest = ELEMENTS[element].largest
    if format not in BLOCKS:
        return amax / largest, None
    if format == "nvfp4":
        tensor_scale = amax.max() / (largest * ELEMENTS["e4m3"].largest)
        ratio = torch.where(tensor_scale > 0, amax / largest / tensor_scale, 0.0)
        return encode(ratio, "e4m3").view(BLOCKS[format].scale_dtype), tensor_scale
    emax = int(torch.frexp(torch.tensor(largest)).exponent) - 1
    exponent = torch.frexp(amax).exponent - 1 - emax
    exponent = torch.where(amax > 0, exponent, -_E8M0_BIAS).clamp(min=-_E8M0_BIAS)
    return (exponent + _E8M0_BIAS).to(torch.uint8).view(BLOCKS[format].scale_dtype), None
