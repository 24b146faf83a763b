"""Causal attention of documents that are packed in one row (exercise 6.5).

Letters: T tokens of all documents together, H heads, D head dimension. A query sees the keys of its own document up to
itself.

Which program takes which queries, how many there are, and the tile: all that is yours.
"""

from __future__ import annotations

import math

import torch

from utils import runtime  # before triton: it decides between GPU and interpreter

from .simple_arguments import check_shape, check_tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOG2_E = 1.4426950408889634


# Lab 6, exercise 6.5: your kernel


def document_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Causal attention of each document by itself, of all documents of a row in one call.

    Args:
        q, k, v: (T, H, D) float16 or bfloat16; D from 16 to 256, and the D numbers of a head lie side by side. The
            strides from token to token and from head to head are each tensor's own. Scores are multiplied by
            1 / sqrt(D).
        cu_seqlens: (documents + 1,) int32, contiguous, rising from 0 to T: document d has the tokens from cu_seqlens[d]
            up to, not including, cu_seqlens[d + 1], and may have none. The values stay on the GPU, and are not checked.

    Returns:
        (T, H, D) of q's dtype, contiguous. Sums are float32.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(q, k, v, cu_seqlens)
    (T, H, D), documents = q.shape, len(cu_seqlens) - 1
    o = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    scale = 1 / math.sqrt(D)
    raise NotImplementedError("Lab 6, exercise 6.5: the launch")


def _check(q, k, v, cu_seqlens) -> None:
    check_tensor("q", q, 3, torch.float16, torch.bfloat16)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, 3, q.dtype)
        if x.shape != q.shape or x.stride(2) != 1:
            got = f"{tuple(x.shape)} with strides {x.stride()}"
            raise ValueError(f"{name} must have shape {tuple(q.shape)} and heads in one piece, got {got}")
    T, H, D = q.shape
    if not T or not H or not 16 <= D <= 256:
        raise ValueError(f"q must have a token, a head and 16 to 256 numbers in it, got shape {(T, H, D)}")
    check_tensor("cu_seqlens", cu_seqlens, 1, torch.int32)
    check_shape("cu_seqlens", cu_seqlens, (max(2, len(cu_seqlens)),))
