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
    raise NotImplementedError("Lab 2, exercise 2.7: tiled matmul")


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
    raise NotImplementedError("Lab 2, exercise 2.7: tiled matmul, the launch")
