"""What the exercises' functions ask of their tensors, checked before anything is computed."""

from __future__ import annotations

import torch

from utils import runtime


def check_tensor(name: str, value: object, axes: int, *dtypes: torch.dtype) -> None:
    """Refuse what is not a tensor of that many axes and one of these dtypes, where kernels run.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another number of axes, or another device.
    """
    if not isinstance(value, torch.Tensor) or value.dtype not in dtypes:
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a tensor of {' or '.join(map(str, dtypes))}, got {got}")
    if value.ndim != axes or value.device.type != runtime.DEVICE.type:
        shape = tuple(value.shape)
        raise ValueError(f"{name} must have {axes} axes and be on {runtime.DEVICE}, got {shape} on {value.device}")


def check_shape(name: str, value: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is not contiguous and of that shape.

    Raises:
        ValueError: with the shape that would be right.
    """
    if tuple(value.shape) != shape or not value.is_contiguous():
        got = f"{tuple(value.shape)} with strides {value.stride()}"
        raise ValueError(f"{name} must have shape {shape} and be contiguous, got {got}")
