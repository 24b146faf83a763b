"""The product of a layer of experts: each group of rows times the matrix of its own expert (exercise 6.7).

Letters: T rows of x, sorted by expert, E experts, K columns of x, N columns of the result.

Which program takes what, how many there are, and the tile: all that is yours.
"""

from __future__ import annotations

import torch

from utils import runtime  # before triton: it decides between GPU and interpreter

from .simple_arguments import check_shape, check_tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip


# Lab 6, exercise 6.7: your kernel


def expert_matmul(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows of x times the matrix of the expert that they are sorted by, of all experts in one launch.

    The first ``counts[0]`` rows meet ``weights[0]``, the next ``counts[1]`` meet ``weights[1]``, and so on.

    Args:
        x: (T, K) float16 or bfloat16; a row lies in one piece, and rows may be further apart than K.
        weights: (E, K, N) of x's dtype, contiguous.
        counts: (E,) int32, contiguous, none negative, T in all; some may be 0. The values stay on the GPU, and are not
            checked.

    Returns:
        (T, N) of x's dtype, contiguous. Sums are float32.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check(x, weights, counts)
    (T, K), (E, _, N) = x.shape, weights.shape
    out = torch.empty((T, N), dtype=x.dtype, device=x.device)
    raise NotImplementedError("Lab 6, exercise 6.7: the launch")


def _check(x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> None:
    check_tensor("x", x, 2, torch.float16, torch.bfloat16)
    check_tensor("weights", weights, 3, x.dtype)
    (T, K), E = x.shape, len(weights)
    if not x.numel() or not weights.numel() or x.stride(1) != 1:
        got = f"x of shape {(T, K)} with strides {x.stride()}, weights of shape {tuple(weights.shape)}"
        raise ValueError(f"x and weights must have elements, and x rows of neighbouring numbers, got {got}")
    check_shape("weights", weights, (E, K, weights.shape[2]))
    check_tensor("counts", counts, 1, torch.int32)
    check_shape("counts", counts, (E,))
