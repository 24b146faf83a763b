"""Sliding-window attention, forward and backward (exercise 3.10), with kernels of your own.

Query i sees key i + Nk - Nq and the ``window - 1`` keys before it (Beltagy et al. 2020, section 3.1; Mistral 7B: Jiang
et al. 2023, section 2).
"""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .arguments import check_attention, softmax_scale
from .flash_backward import attention_delta
from .flash_forward_simple import tile_ptrs
from .tiles import LOG2_E, empty_in_order

import triton  # isort: skip
import triton.language as tl  # isort: skip


# Lab 3, exercise 3.10: your kernels


def check_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> int:
    """The window, at most all keys; refuses what no function here can take.

    Raises:
        TypeError, ValueError: as :func:`.arguments.check_attention`; shared heads; a window that is no integer above 0.
    """
    check_attention(q, k, v)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"k and v must have q's {q.shape[1]} heads, got {k.shape[1]}")
    if isinstance(window, bool) or not isinstance(window, int):
        raise TypeError(f"window must be an integer, got {type(window).__name__}")
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    return min(window, max(1, k.shape[2]))


def window_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in which a query sees ``window`` keys at most, and its logsumexp; no gradient is recorded.

    Args:
        q: (B, H, Nq, D), float32 (multiplied as such, not as TF32), float16 or bfloat16, any strides, D 16 to 256.
        k, v: (B, H, Nk, D) of q's dtype.
        window: Query i sees keys i + Nk - Nq - window < j <= i + Nk - Nq: the last query sees the last key. At least 1.
        scale: Factor of the scores, by default 1 / sqrt(D).

    Returns:
        o, of q's shape and dtype, and L (B, H, Nq) float32, contiguous, the natural logsumexp of each row of scores. A
        query that sees no key has o = 0 and L = -inf.

    Raises:
        TypeError, ValueError: as :func:`check_window`.
    """
    window = check_window(q, k, v, window)
    scale = softmax_scale(scale, q.shape[3])
    raise NotImplementedError("Lab 3, exercise 3.10: the forward pass")


def window_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    window: int,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, each in its shape and dtype; 0 for a query that sees no key and a key that none sees.

    Args:
        q, k, v, window, scale: As :func:`window_attention` took them.
        o, lse: What it returned.
        do: dO, (B, H, Nq, D) of q's dtype, any strides.

    Raises:
        TypeError, ValueError: as :func:`check_window`.
    """
    window = check_window(q, k, v, window)
    scale = softmax_scale(scale, q.shape[3])
    raise NotImplementedError("Lab 3, exercise 3.10: the backward pass")
