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


### BEGIN SOLUTION 6.7: your kernel
@triton.jit
def expert_kernel(
    x_ptr, weights_ptr, out_ptr, counts_ptr, E, N, K, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: a tile (BLOCK_M, BLOCK_N) of out, whose rows belong to one expert. Tiles begin anew in each group.

    A program finds its tile by going through the counts. An expert without rows has no tile.
    """
    tile, begin = tl.program_id(0), 0
    expert, first, end = 0, 0, 0
    for e in range(E):
        count = tl.load(counts_ptr + e)
        mine = (tile >= 0) & (tile * BLOCK_M < count)
        expert = tl.where(mine, e, expert)
        first = tl.where(mine, begin + tile * BLOCK_M, first)
        end = tl.where(mine, begin + count, end)
        tile -= tl.cdiv(count, BLOCK_M)
        begin += count
    if end == 0:
        return  # the grid has room for more tiles than these counts make
    row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_ptr = weights_ptr + expert.to(tl.int64) * K * N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + row[:, None] * stride_x + inner[None, :]
        x = tl.load(x_ptrs, mask=(row < end)[:, None] & (inner < K)[None, :], other=0.0)  # (BLOCK_M, BLOCK_K)
        w_ptrs = weight_ptr + inner.to(tl.int64)[:, None] * N + column[None, :]
        w = tl.load(w_ptrs, mask=(inner < K)[:, None] & (column < N)[None, :], other=0.0)  # (BLOCK_K, BLOCK_N)
        total = tl.dot(x, w, total)
    out_ptrs = out_ptr + row[:, None] * N + column[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < N)[None, :])


### END SOLUTION


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
    ### BEGIN SOLUTION 6.7: the launch
    m, n, k = runtime.pick(cpu=(32, 32, 32), gpu=(128, 128, 64))
    most = T // m + min(E, T)  # each expert's last tile may have a single row
    expert_kernel[(most, triton.cdiv(N, n))](
        x, weights, out, counts, E, N, K, x.stride(0), BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=8
    )
    return out
    ### END SOLUTION


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
