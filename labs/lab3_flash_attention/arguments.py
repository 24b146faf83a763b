"""What every function of this lab asks of its tensors, checked before anything is computed."""

from __future__ import annotations

import math

import torch

from utils import runtime

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 256


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, on_device: bool = True) -> None:
    """Refuse what no function here can take, naming the argument, what it is and what would be right.

    Args:
        q: (B, Hq, Nq, D), float32, float16 or bfloat16, any strides; D from 16 to 256.
        k, v: (B, Hkv, Nk, D) of q's dtype and device; Hkv divides Hq. There is at least one query and one key.
        on_device: Whether the tensors must be where kernels run.

    Raises:
        TypeError: one is no tensor, or a dtype is none of these or not q's.
        ValueError: shapes that do not fit, or tensors that are elsewhere.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        if value.dtype not in FLOATS:
            raise TypeError(f"{name} must be float32, float16 or bfloat16, got {dtype_name(value)}")
        if value.ndim != 4:
            raise ValueError(f"{name} must have four axes, (B, H, N, D), got shape {tuple(value.shape)}")
        if on_device and value.device.type != runtime.DEVICE.type:
            raise ValueError(f"{name} must be on {runtime.DEVICE} (utils.runtime.DEVICE), got {value.device}")
        if value.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {dtype_name(q)}, got {dtype_name(value)}")
        if value.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {value.device}")
        if value.shape[2] == 0:
            raise ValueError(f"{name} must hold at least one row on axis 2, got shape {tuple(value.shape)}")
    B, Hq, _, D = q.shape
    if not SMALLEST_HEAD_DIM <= D <= LARGEST_HEAD_DIM:
        raise ValueError(f"head_dim must be from {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}, got {D}")
    for name, value in (("k", k), ("v", v)):
        if value.shape[0] != B or value.shape[3] != D:
            raise ValueError(f"{name} must have shape ({B}, Hkv, Nk, {D}) to fit q, got {tuple(value.shape)}")
    if k.shape != v.shape:
        raise ValueError(f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    Hkv = k.shape[1]
    if Hq and (Hkv == 0 or Hq % Hkv):
        raise ValueError(f"the heads of q must be a multiple of those of k and v, got {Hq} and {Hkv}")


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the scores: ``scale``, or 1 / sqrt(D) where it is None.

    Raises:
        TypeError: ``scale`` is no number.
        ValueError: it is not finite.
    """
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def dtype_name(value: torch.Tensor) -> str:
    """``float32`` for a tensor of ``torch.float32``."""
    return str(value.dtype).removeprefix("torch.")
