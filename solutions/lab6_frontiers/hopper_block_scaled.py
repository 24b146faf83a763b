"""The product with a scale for each 128 of K on Hopper: one warpgroup loads, two multiply and scale.

A sum of 128 products must leave the tensor core before the next begins, because each has scales of its own. A kernel
that waits for it leaves the tensor core idle meanwhile. Here two warpgroups share it: while one scales and adds its
last sums, those of the other are on their way.

A tile has 128 rows and 256 columns. A warpgroup holds 64 x 256 sums of it, 128 registers per thread, and takes its
products 128 columns at a time, 64 registers more.

The record ``frontier_kernels`` has it beside ``torch._scaled_mm`` with scales of rows, and beside bf16. Two variants
were slower on an H200: explicit turns at the tensor core, and rows of a in registers.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from solutions.capstone_hopper.parts import barriers, wait_for_all

from .hopper_products import STAGES, TOGETHER, K, M, N, halves, launch, place, producer, store, tiles_of
from .square_blocks import SquareBlocks
from .tiles import programs

#: Registers per thread of a warpgroup that multiplies.
MULTIPLYING = 224


@gluon.jit
def multiply(a, b_tile):
    """64 x 128 sums of 128 products."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    zeros = gl.zeros([64, 128], gl.float32, OUT)
    sums = warpgroup_mma(a, b_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [sums])


@gluon.jit
def consumer(GROUP: gl.constexpr, c_desc, scales, sizes, tiles, blocks, ring, c_tiles, S: gl.constexpr,
             TOGETHER: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 rows of each tile, 128 columns at a time. Scales are read a block ahead."""
    a_tiles, b_tiles, full, empty = ring
    a_scale_ptr, a_stride_m, a_stride_k, b_scale_ptr, b_stride_n, b_stride_k = scales
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    c_even = c_tiles.index(GROUP * 2)
    c_odd = c_tiles.index(GROUP * 2 + 1)
    step = 0
    for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        row, column = place(tile, tiles[0], tiles[1], TOGETHER)
        row += GROUP * 64
        rows = gl.minimum(row + gl.arange(0, 64, layout=ROWS), sizes[0] - 1)  # beyond the end anything will do
        a_scales = a_scale_ptr + rows * a_stride_m
        b_left = b_scale_ptr + column // 128 * b_stride_n
        b_right = b_scale_ptr + gl.minimum(column // 128 + 1, (sizes[1] - 1) // 128) * b_stride_n
        next_a = gl.load(a_scales)  # (64,)
        next_left = gl.load(b_left)
        next_right = gl.load(b_right)
        total_left = gl.zeros([64, 128], gl.float32, OUT)
        total_right = gl.zeros([64, 128], gl.float32, OUT)
        for block in range(blocks):
            s = step % S
            left = next_a * next_left
            right = next_a * next_right
            following = gl.minimum(block + 1, blocks - 1)
            next_a = gl.load(a_scales + following * a_stride_k)  # on its way while the tensor core works
            next_left = gl.load(b_left + following * b_stride_k)
            next_right = gl.load(b_right + following * b_stride_k)
            mbarrier.wait(full.index(s), (step // S) & 1)
            a = a_tiles.index(s).slice(GROUP * 64, 64)
            total_left += multiply(a, b_tiles.index(s).slice(0, 128)) * left[:, None]
            sums = multiply(a, b_tiles.index(s).slice(128, 128))
            mbarrier.arrive(empty.index(s))
            total_right += sums * right[:, None]
            step += 1
        first, second = halves(total_left)
        store(first, c_desc, c_even, row, column)
        store(second, c_desc, c_odd, row, column + 64)
        first, second = halves(total_right)
        store(first, c_desc, c_even, row, column + 128)
        store(second, c_desc, c_odd, row, column + 192)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "columns", "blocks"])
def hopper_block_scaled_kernel(a_desc, b_desc, c_desc, a_scale_ptr, b_scale_ptr, rows, columns, blocks, a_stride_m,
                               a_stride_k, b_stride_n, b_stride_k, S: gl.constexpr, TOGETHER: gl.constexpr,
                               REGISTERS: gl.constexpr):  # fmt: skip
    """Every ``num_programs``-th tile of c."""
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [S, 128, 128], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [S, 256, 128], b_desc.layout)
    c_tiles = gl.allocate_shared_memory(c_desc.dtype, [4, 64, 64], c_desc.layout)
    ring = (a_tiles, b_tiles, barriers(S, 1), barriers(S, 2))
    fence_async_shared()
    wait_for_all()
    scales = (a_scale_ptr, a_stride_m, a_stride_k, b_scale_ptr, b_stride_n, b_stride_k)
    sizes = (rows, columns)
    tiles = (gl.cdiv(rows, 128), gl.cdiv(columns, 256))
    gl.warp_specialize([
        (producer, (a_desc, b_desc, tiles, blocks, ring, S, TOGETHER)),
        (consumer, (gl.constexpr(0), c_desc, scales, sizes, tiles, blocks, ring, c_tiles, S, TOGETHER)),
        (consumer, (gl.constexpr(1), c_desc, scales, sizes, tiles, blocks, ring, c_tiles, S, TOGETHER)),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip


def hopper_block_scaled(a: torch.Tensor, a_scales: torch.Tensor, b: SquareBlocks, c: torch.Tensor) -> None:
    """c (M, N), bfloat16 or float16, becomes the product of a (M, K) with a scale for each 128 of a row, and b (N, K).

    All three must be such that TMA can describe them (:func:`.tiles.aligned`), and the :func:`.tiles.extent` of the
    scales less than 2^31.
    """
    rows, columns = c.shape
    count = -(-rows // M) * -(-columns // N)
    launch(
        hopper_block_scaled_kernel, min(count, programs(a.device)), tiles_of(a, M, K), tiles_of(b.values, N, K),
        tiles_of(c, 64, 64), a_scales, b.scales, rows, columns, a.shape[1] // K, *a_scales.stride(),
        *b.scales.stride(), STAGES, TOGETHER, MULTIPLYING,
    )  # fmt: skip
