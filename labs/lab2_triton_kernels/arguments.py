"""What every function of this lab asks of its tensors, checked before anything is computed."""

from __future__ import annotations

import torch

from utils import runtime

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(name: str, value: torch.Tensor, least_dims: int = 0) -> None:
    """Refuse what no kernel here can take, naming the argument, what it is and what would be right.

    Raises:
        TypeError: ``value`` is no tensor, or its dtype is none of float32, float16 and bfloat16.
        ValueError: it has fewer than ``least_dims`` axes, or is not where kernels run.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {dtype_name(value)}")
    if value.ndim < least_dims:
        raise ValueError(f"{name} must have at least {least_dims} axes, got shape {tuple(value.shape)}")
    if value.device.type != runtime.DEVICE.type:
        raise ValueError(f"{name} must be on {runtime.DEVICE} (utils.runtime.DEVICE), got {value.device}")


def check_same(first: str, a: torch.Tensor, second: str, b: torch.Tensor) -> None:
    """Refuse two tensors of different dtype or device.

    Raises:
        TypeError: their dtypes differ.
        ValueError: they are on different devices.
    """
    if a.dtype != b.dtype:
        raise TypeError(f"{second} must have {first}'s dtype {dtype_name(a)}, got {dtype_name(b)}")
    if a.device != b.device:
        raise ValueError(f"{second} must be on {first}'s device {a.device}, got {b.device}")


def check_vector(name: str, vector: torch.Tensor, x: torch.Tensor) -> None:
    """Refuse a ``vector`` that does not hold one number for each column of ``x`` (..., columns).

    Raises:
        TypeError, ValueError: dtype, device or shape are not what ``x`` asks for.
    """
    check_tensor(name, vector)
    check_same("x", x, name, vector)
    if tuple(vector.shape) != (x.shape[-1],):
        raise ValueError(
            f"{name} must have shape ({x.shape[-1]},), one for each column of x, got {tuple(vector.shape)}"
        )


def refuse_gradient(function: str, *tensors: torch.Tensor) -> None:
    """Refuse to lose a gradient silently: ``function`` has a forward pass only.

    Raises:
        RuntimeError: autograd is recording and one of the tensors asks for its gradient.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(f"{function} has no backward pass: call it under torch.no_grad(), or on x.detach()")


def dtype_name(value: torch.Tensor) -> str:
    """``float32`` for a tensor of ``torch.float32``."""
    return str(value.dtype).removeprefix("torch.")
