"""The product of two matrices in tiles, through pointers: any shape, any stride (exercise 2.7)."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .grouping import swizzle_tile

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def tiled_matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program: the tile of c (M, N) that ``swizzle_tile`` gives it; a is (M, K), b is (K, N)."""
    tile_m, tile_n = swizzle_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    ### BEGIN SOLUTION 2.7: tiled matmul
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    if INT64:  # some offset passes 2^31
        row, column, inner = row.to(tl.int64), column.to(tl.int64), inner.to(tl.int64)
    a_ptrs = a_ptr + row[:, None] * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + inner[:, None] * stride_bk + column[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(row[:, None] < M) & (inner[None, :] < K - start), other=0.0)  # (BLOCK_M, BLOCK_K)
        b = tl.load(b_ptrs, mask=(inner[:, None] < K - start) & (column[None, :] < N), other=0.0)  # (BLOCK_K, BLOCK_N)
        if a.dtype == tl.float32:
            # One chain of K additions rounds K times; a sum for each step, then the sum of these, rounds each product
            # BLOCK_K + K / BLOCK_K times. The compiler would chain them again but for the last argument, which says
            # how many products may be added up before a total takes them in. "ieee": fp32 operands, not TF32.
            total += tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
        else:
            total = tl.dot(a, b, total)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + row[:, None] * stride_cm + column[None, :]
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=(row[:, None] < M) & (column[None, :] < N))
    ### END SOLUTION


def tiled_matmul(a: torch.Tensor, b: torch.Tensor, group: int = 1) -> torch.Tensor:
    """``a @ b`` in tiles, each the work of one program; ``group`` rows of tiles at a time.

    Args:
        a: (M, K) of any strides; float32, float16 or bfloat16. The caller has checked a and b.
        b: (K, N) of any strides, of a's dtype.
        group: Rows of tiles in a group; with 1 the tiles follow one another row by row.

    Returns:
        (M, N), contiguous, of a's dtype; products are summed in float32.
    """
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    tile = tuning.tiled_matmul(a.element_size())
    wide = any(
        sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + tile.k * max(x.stride()) >= 2**31
        for x in (a, b, c)
    )
    ### BEGIN SOLUTION 2.7: tiled matmul, the launch
    tiled_matmul_kernel[(triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n),)](
        a, b, c, M, N, K, *a.stride(), *b.stride(), c.stride(0),
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, GROUP_M=group, INT64=wide,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return c
    ### END SOLUTION
