"""What the kernels over the paged cache ask of their tensors, checked on entry and without waiting for a GPU."""

from __future__ import annotations

import math

import torch

from utils import runtime

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
SMALLEST_HEAD_DIM, LARGEST_HEAD_DIM = 16, 256


def check_tensor(name: str, value: object, shape: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse what is no tensor of these axes and dtypes on the device where kernels run.

    Args:
        shape: The axes in words, ``"(S, H, D)"``.

    Raises:
        TypeError, ValueError: with ``name``, what it is and what would be right.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    axes = shape.count(",") + (0 if shape.endswith(",)") else 1)
    if value.ndim != axes:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    if value.dtype not in dtypes:
        names = " or ".join(", ".join(map(dtype_name, dtypes)).rsplit(", ", 1))
        raise TypeError(f"{name} must be {names}, got {dtype_name(value.dtype)}")
    if value.device.type != runtime.DEVICE.type:
        raise ValueError(f"{name} must be on {runtime.DEVICE} (utils.runtime.DEVICE), got {value.device}")


def check_same(name: str, value: torch.Tensor, shape: tuple[int, ...], why: str) -> None:
    """Refuse a tensor of another shape.

    Raises:
        ValueError: with ``why`` it should have that shape.
    """
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} {why}, got {tuple(value.shape)}")


def check_cache(q_name: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Refuse caches that do not fit (tokens or sequences, heads, D) ``q``: its dtype, device, D and a divisor of heads.

    Raises:
        TypeError, ValueError: as :func:`check_tensor`.
    """
    shape = "(num_blocks, block_size, G, D)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, cache, shape, FLOATS)
        if cache.dtype != q.dtype:
            raise TypeError(f"{name} must have {q_name}'s dtype {dtype_name(q.dtype)}, got {dtype_name(cache.dtype)}")
        if cache.device != q.device:
            raise ValueError(f"{name} must be on {q_name}'s device {q.device}, got {cache.device}")
    check_same("v_cache", v_cache, tuple(k_cache.shape), "as k_cache")
    _, block_size, G, D = k_cache.shape
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, got {block_size} (k_cache has shape {shape})")
    if not SMALLEST_HEAD_DIM <= D <= LARGEST_HEAD_DIM:
        raise ValueError(f"head_dim must be from {SMALLEST_HEAD_DIM} to {LARGEST_HEAD_DIM}, got {D}")
    if q.shape[2] != D:
        raise ValueError(f"{q_name} must have the caches' head_dim {D} on its last axis, got {tuple(q.shape)}")
    H = q.shape[1]
    if G == 0 or H % G:
        raise ValueError(f"the heads of {q_name} must be a multiple of those of the caches, got {H} and {G}")


def check_sequences(S: int, block_tables: torch.Tensor, context_lens: torch.Tensor, device: torch.device) -> None:
    """Refuse a block table or context lengths that do not belong to ``S`` sequences.

    Raises:
        TypeError, ValueError: as :func:`check_tensor`.
    """
    check_tensor("block_tables", block_tables, "(S, max_blocks)", INTEGERS)
    check_tensor("context_lens", context_lens, "(S,)", INTEGERS)
    check_same("context_lens", context_lens, (S,), f"for {S} sequences")
    check_same("block_tables", block_tables, (S, block_tables.shape[1]), f"for {S} sequences")
    for name, value in (("block_tables", block_tables), ("context_lens", context_lens)):
        if value.device != device:
            raise ValueError(f"{name} must be on q's device {device}, got {value.device}")


def check_splits(num_splits: int | None) -> None:
    """Refuse what is neither None nor a whole number of at least 1.

    Raises:
        TypeError, ValueError: with what it is.
    """
    if num_splits is None:
        return
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits must be a whole number or None, got {type(num_splits).__name__}")
    if num_splits < 1:
        raise ValueError(f"num_splits must be at least 1, got {num_splits}")


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


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
