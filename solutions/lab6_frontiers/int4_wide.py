"""The product with 4-bit weights for batches that fill a tensor core's tile."""

from __future__ import annotations

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .int4_unpack import unpack_nibbles

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["M", "groups", "splits"])
def int4_matmul_wide_kernel(
    x_ptr, codes_ptr, scales_ptr, o_ptr, stride_xm, stride_xk, M, N, groups, splits,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK_N`` rows of the weight times ``BLOCK_M`` activations, one group after the other.

    The weights are the left operand, which Hopper's tensor cores take from registers, where they are unpacked. ``EVEN``
    says that ``BLOCK_N`` divides N.
    """
    dtype = x_ptr.dtype.element_ty
    part, tile_m = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    halfword = tl.arange(0, 32)
    first, end = groups * part // splits, groups * (part + 1) // splits

    place = first * tl.cast(N, tl.int64) + row
    codes_ptrs = codes_ptr + place[:, None] * 32 + halfword[None, :]
    scales_ptrs = scales_ptr + place
    x_ptrs = x_ptr + token.to(tl.int64)[None, :] * stride_xm
    x_ptrs += (first * 128 + halfword).to(tl.int64)[:, None] * stride_xk
    inside = row < N
    asked = (token < M)[None, :]

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    scales = tl.load(scales_ptrs, mask=inside, other=0.0)  # (BLOCK_N,)
    for group in range(first, end):
        if EVEN:
            codes = tl.load(codes_ptrs)  # (BLOCK_N, 32) int16, one piece of memory
        else:
            codes = tl.load(codes_ptrs, mask=inside[:, None], other=0)
        scales_ptrs += tl.cast(N, tl.int64)
        # A step ahead: the compiler loads ahead only what a product reads.
        next_scales = tl.load(scales_ptrs, mask=inside & (group + 1 < end), other=0.0)
        weights = unpack_nibbles(codes, dtype, ASSEMBLY)
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for j in tl.static_range(4):
            x = tl.load(x_ptrs + 32 * j * stride_xk, mask=asked, other=0.0)  # (32, BLOCK_M), from the L2
            sums = tl.dot(weights[j], x, sums)
        acc += sums * scales[:, None]
        scales = next_scales
        codes_ptrs += tl.cast(N, tl.int64) * 32
        x_ptrs += 128 * stride_xk
    o_ptrs = o_ptr + token.to(tl.int64)[None, :] * N + row[:, None]
    if SPLIT:
        o_ptrs += part.to(tl.int64) * M * N
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=asked & inside[:, None])
