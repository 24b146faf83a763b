"""8-bit floating point in NumPy: Triton's interpreter stores it as uint8, and so does this."""

from __future__ import annotations

import numpy as np
import torch

import triton.language as tl  # isort: skip

_TORCH = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def is_float8(dtype: tl.dtype) -> bool:
    """Whether ``dtype`` is one of the two formats of NVIDIA's GPUs (``tl.float8e4nv``, ``tl.float8e5``)."""
    return dtype.name in _TORCH


def widen(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The float32 values that ``bits`` (any shape, uint8) of the 8-bit format ``dtype`` stand for; exact."""
    with torch._C.DisableTorchFunction():  # who watches PyTorch's functions is told nothing of these
        flat = torch.from_numpy(np.array(bits, dtype=np.uint8).reshape(-1))
        return flat.view(_TORCH[dtype.name]).float().numpy().reshape(np.shape(bits))


def narrow(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Bits (uint8) of the value of format ``dtype`` nearest to each number, ties to even.

    What is too large, infinities included, becomes the largest finite value and NaN stays NaN, as in a GPU's
    ``cvt.rn.satfinite``, which Triton compiles such a cast to.
    """
    target = _TORCH[dtype.name]
    most = torch.finfo(target).max
    with torch._C.DisableTorchFunction():
        flat = torch.from_numpy(np.array(values, dtype=np.float32).reshape(-1))
        return flat.clamp(-most, most).to(target).view(torch.uint8).numpy().reshape(np.shape(values))
