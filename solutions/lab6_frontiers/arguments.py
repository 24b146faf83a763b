"""What the functions of this lab ask of their tensors, checked before anything is computed."""

from __future__ import annotations

import torch

from utils import runtime
from utils.formats import Quantized

from .square_blocks import SquareBlocks

#: Columns of a row, or of a row and 128 rows, that share a scale.
BLOCK = 128


def check_device(name: str, value: torch.Tensor) -> None:
    """Refuse a tensor that is not where kernels run.

    Raises:
        ValueError: with the device that would be right.
    """
    if value.device.type != runtime.DEVICE.type:
        raise ValueError(f"{name} must be on {runtime.DEVICE} (utils.runtime.DEVICE), got {value.device}")


def check_operand(name: str, x: object, least_dims: int) -> None:
    """Refuse an operand of a scaled product that is not (..., K) in e4m3 with K contiguous.

    Raises:
        TypeError: it is not quantised.
        ValueError: its format, its axes, its strides or its device are others.
    """
    if not isinstance(x, Quantized):
        raise TypeError(
            f"{name} must be Quantized (see quantize, quantize_rows, quantize_blocks), got {type(x).__name__}"
        )
    if x.format != "e4m3":
        raise ValueError(f"{name} must be in e4m3, got {x.format}")
    if x.values.ndim < least_dims:
        raise ValueError(f"{name} must have at least {least_dims} axes, got shape {tuple(x.values.shape)}")
    check_device(name, x.values)
    if x.scales.device != x.values.device:
        raise ValueError(f"{name}.scales must be on {x.values.device} as {name}.values, got {x.scales.device}")
    if x.values.stride(-1) != 1 and x.values.shape[-1] > 1 and x.values.numel():
        raise ValueError(
            f"{name}.values must be contiguous along K, as 8-bit tensor cores read it, got strides {x.values.stride()} "
            f"for shape {tuple(x.values.shape)} (quantise x.contiguous())"
        )
    _check_scales(name, x)


def _check_scales(name: str, x: Quantized) -> None:
    """Refuse scales that do not go with the values.

    Raises:
        TypeError: they are not float32.
        ValueError: they have another shape than the values and the block ask for.
    """
    if x.scales.dtype != torch.float32:
        raise TypeError(f"{name}.scales must be float32, got {dtype_name(x.scales.dtype)}")
    *leading, K = x.values.shape
    if isinstance(x, SquareBlocks):
        leading = [-(-leading[0] // x.block)]
    shape = () if x.block is None else (*leading, K // x.block)
    if x.scales.shape != shape:
        raise ValueError(
            f"{name}.scales must have shape {shape} for values of {tuple(x.values.shape)} in blocks of {x.block}, "
            f"got {tuple(x.scales.shape)}"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
