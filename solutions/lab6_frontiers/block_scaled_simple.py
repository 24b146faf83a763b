"""A product of e4m3 matrices whose rows have a scale for each 128 of K (exercise 6.2).

Letters: M rows of a, N rows of b, K their common axis: c[m, n] is the sum over k of

    a[m, k] * a_scales[m, k // 128] * b[n, k] * b_scales[n, k // 128]

Which program takes what, how many there are, and the tile: all that is yours. (The compiler needs tiles with sides of
powers of two, for 8-bit products at least 16 rows and columns, and 32 along K.)
"""

from __future__ import annotations

import torch

from utils import runtime  # before triton: it decides between GPU and interpreter

from .simple_arguments import check_shape, check_tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: Neighbours along K that share a scale.
BLOCK = 128


### BEGIN SOLUTION 6.2: your kernel
@triton.jit
def block_scaled_kernel(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, c_ptr, M, N, K, stride_a, stride_b,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: a tile (BLOCK_M, BLOCK_N) of c. ``BLOCK_K`` neighbours along K share a scale."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    blocks = K // BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(blocks):
        inner = block * BLOCK_K + k
        a = tl.load(
            a_ptr + m[:, None] * stride_a + inner[None, :], mask=m[:, None] < M, other=0.0
        )  # (BLOCK_M, BLOCK_K)
        b = tl.load(
            b_ptr + n[:, None] * stride_b + inner[None, :], mask=n[:, None] < N, other=0.0
        )  # (BLOCK_N, BLOCK_K)
        a_scale = tl.load(a_scales_ptr + m * blocks + block, mask=m < M, other=0.0)  # (BLOCK_M,)
        b_scale = tl.load(b_scales_ptr + n * blocks + block, mask=n < N, other=0.0)  # (BLOCK_N,)
        # a sum in the tensor core is over one block, and starts from zero: the blocks are added up in float32
        total += tl.dot(a, b.T) * a_scale[:, None] * b_scale[None, :]
    c_ptrs = c_ptr + m[:, None] * N + n[None, :]
    tl.store(c_ptrs, total.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


### END SOLUTION


def block_scaled_matmul(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor
) -> torch.Tensor:
    """The product of two matrices in e4m3 that have a scale for each 128 numbers of a row.

    Hopper's tensor cores add 8-bit products with about 14 bits of a sum, whatever the accumulator's dtype (DeepSeek-V3
    technical report, 2024, section 3.3.2), so a sum of theirs goes over 128 products at most.

    Args:
        a: (M, K) float8_e4m3fn; a row lies in one piece, and rows may be further apart than K. K is a multiple of 128.
        a_scales: (M, K / 128) float32, contiguous.
        b: (N, K), like a.
        b_scales: (N, K / 128) float32, contiguous.

    Returns:
        (M, N) bfloat16, contiguous. Sums are float32.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    _check("a", a, a_scales)
    _check("b", b, b_scales)
    (M, K), N = a.shape, len(b)
    if b.shape[1] != K:
        raise ValueError(f"b must have a's K = {K} columns, got shape {tuple(b.shape)}")
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    ### BEGIN SOLUTION 6.2: the launch
    m, n = runtime.pick(cpu=(32, 32), gpu=(128, 64))  # 128 x 128 spills on sm_90
    block_scaled_kernel[(triton.cdiv(M, m) * triton.cdiv(N, n),)](
        a, a_scales, b, b_scales, c, M, N, K, a.stride(0), b.stride(0),
        BLOCK_M=m, BLOCK_N=n, BLOCK_K=BLOCK, num_warps=8,
    )  # fmt: skip
    return c
    ### END SOLUTION


def _check(name: str, x: torch.Tensor, scales: torch.Tensor) -> None:
    check_tensor(name, x, 2, torch.float8_e4m3fn)
    check_tensor(f"{name}_scales", scales, 2, torch.float32)
    rows, K = x.shape
    if not rows or not K or K % BLOCK or x.stride(1) != 1:
        raise ValueError(
            f"{name} must have rows of a multiple of {BLOCK} neighbouring numbers, got shape {(rows, K)} with strides "
            f"{x.stride()}"
        )
    check_shape(f"{name}_scales", scales, (rows, K // BLOCK))
