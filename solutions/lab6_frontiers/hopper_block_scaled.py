"""The product with a scale for each 128 of K on Hopper: one warpgroup loads, two multiply and scale.

A sum of 128 products must leave the tensor core before the next begins, because each has scales of its own. A kernel
that waits for it leaves the tensor core idle meanwhile. Here each of two warpgroups has the next sums on their way
while it scales and adds the last, and the two share the tensor core.

A tile has 128 rows and 256 columns: at the tensor core's full rate it takes 48 bytes of operands in a cycle from the L2
cache, and one of 128 x 128 would take 64. A warpgroup holds 64 x 256 sums of it, 128 registers a thread. So it takes
its products 64 columns at a time, two times 32 registers more, and keeps its 64 rows of a in registers as well; from
shared memory, the tensor core would read a as often as b.

On an H100 (torch 2.11, Triton 3.6, 2026-11-28) it has, at 4096 and 8192 square, 0.75 and 0.71 of the rate of
``torch._scaled_mm`` with scales of rows, 1.40 and 1.45 of bf16's in the same run. Without any scales in the loop it
would have 0.79 and 0.75. Three warpgroups of 64 x 128 sums each reach 0.68 and 0.69; with a in shared memory it is 0.56
and 0.50, as values no longer fit into registers.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from solutions.capstone_hopper.parts import barriers, wait_for_all

from .square_blocks import SquareBlocks
from .tiles import programs

#: Rows and columns of a tile, products that share a scale, stages of operands, rows of tiles taken together.
M, N, K, STAGES, TOGETHER = 128, 256, 128, 4, 8
#: Registers a thread: of the launch, of a warpgroup that multiplies. The warp that loads gives its own away.
LAUNCHED, MULTIPLYING = 168, 232
ELEMENTS = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def place(tile, tiles_m, tiles_n, TOGETHER: gl.constexpr):
    """First row and first column of a tile, ``TOGETHER`` rows of tiles column by column."""
    group = TOGETHER * tiles_n
    first = tile // group * TOGETHER
    rows = gl.minimum(tiles_m - first, TOGETHER)
    inside = tile % group
    return (first + inside % rows) * 128, inside // rows * 256


@gluon.jit
def producer(a_desc, b_desc, tiles, blocks, ring, S: gl.constexpr, TOGETHER: gl.constexpr):
    """One warp: asks TMA for the operands of the next 128 of K, whenever a stage is free."""
    a_tiles, b_tiles, full, empty = ring
    step = 0
    for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        row, column = place(tile, tiles[0], tiles[1], TOGETHER)
        for block in range(blocks):
            s = step % S
            mbarrier.wait(empty.index(s), ((step // S) & 1) ^ 1)
            mbarrier.expect(full.index(s), (128 + 256) * 128)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(a_desc, [row + half * 64, block * 128], full.index(s),
                                                a_tiles.index(s * 2 + half))  # fmt: skip
            for part in gl.static_range(4):
                tma.async_copy_global_to_shared(b_desc, [column + part * 64, block * 128], full.index(s),
                                                b_tiles.index(s * 4 + part))  # fmt: skip
            step += 1


@gluon.jit
def multiply(a, b_tile, OUT: gl.constexpr):
    """64 x 64 sums of 128 products, on their way."""
    return warpgroup_mma(a, b_tile.permute((1, 0)), gl.zeros([64, 64], gl.float32, OUT), use_acc=False, is_async=True)


@gluon.jit
def store(left, right, c_desc, c_tile, row, column):
    """64 x 128 numbers of c through shared memory, once what was there has left it."""
    tma.store_wait(0)
    wait_for_all()
    c_tile.slice(0, 64, 1).store(left.to(c_tile.dtype))
    c_tile.slice(64, 64, 1).store(right.to(c_tile.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, column], c_tile)


@gluon.jit
def consumer(GROUP: gl.constexpr, c_desc, scales, sizes, tiles, blocks, ring, c_tiles, S: gl.constexpr,
             TOGETHER: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 rows of each tile, 64 columns at a time; the next 64 are multiplied while some are scaled."""
    a_tiles, b_tiles, full, empty = ring
    a_scale_ptr, a_stride_m, a_stride_k, b_scale_ptr, b_stride_n, b_stride_k = scales
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    c_tile = c_tiles.index(GROUP)
    step = 0
    for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        row, column = place(tile, tiles[0], tiles[1], TOGETHER)
        row += GROUP * 64
        rows = gl.minimum(row + gl.arange(0, 64, layout=ROWS), sizes[0] - 1)  # beyond the end anything will do
        a_scales = a_scale_ptr + rows * a_stride_m
        b_left = b_scale_ptr + column // 128 * b_stride_n
        b_right = b_scale_ptr + gl.minimum(column // 128 + 1, (sizes[1] - 1) // 128) * b_stride_n
        total0 = gl.zeros([64, 64], gl.float32, OUT)
        total1 = gl.zeros([64, 64], gl.float32, OUT)
        total2 = gl.zeros([64, 64], gl.float32, OUT)
        total3 = gl.zeros([64, 64], gl.float32, OUT)
        for block in range(blocks):
            s = step % S
            a_scale = gl.load(a_scales + block * a_stride_k)  # on its way while the tensor core works
            left = a_scale * gl.load(b_left + block * b_stride_k)
            right = a_scale * gl.load(b_right + block * b_stride_k)
            mbarrier.wait(full.index(s), (step // S) & 1)
            a = a_tiles.index(s * 2 + GROUP).load(gl.DotOperandLayout(0, OUT, 4))
            sums = multiply(a, b_tiles.index(s * 4), OUT)
            next_sums = multiply(a, b_tiles.index(s * 4 + 1), OUT)
            sums = warpgroup_mma_wait(1, [sums])
            total0 += sums * left[:, None]
            sums = multiply(a, b_tiles.index(s * 4 + 2), OUT)
            next_sums = warpgroup_mma_wait(1, [next_sums])
            total1 += next_sums * left[:, None]
            next_sums = multiply(a, b_tiles.index(s * 4 + 3), OUT)
            sums = warpgroup_mma_wait(1, [sums])
            total2 += sums * right[:, None]
            next_sums = warpgroup_mma_wait(0, [next_sums])
            mbarrier.arrive(empty.index(s))
            total3 += next_sums * right[:, None]
            step += 1
        store(total0, total1, c_desc, c_tile, row, column)
        store(total2, total3, c_desc, c_tile, row, column + 128)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "columns", "blocks"])
def hopper_block_scaled_kernel(a_desc, b_desc, c_desc, a_scale_ptr, b_scale_ptr, rows, columns, blocks, a_stride_m,
                               a_stride_k, b_stride_n, b_stride_k, S: gl.constexpr, TOGETHER: gl.constexpr,
                               REGISTERS: gl.constexpr):  # fmt: skip
    """Every ``num_programs``-th tile of c."""
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [2 * S, 64, 128], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [4 * S, 64, 128], b_desc.layout)
    c_tiles = gl.allocate_shared_memory(c_desc.dtype, [2, 64, 128], c_desc.layout)
    ring = (a_tiles, b_tiles, barriers(S, 1), barriers(S, 2))
    fence_async_shared()
    scales = (a_scale_ptr, a_stride_m, a_stride_k, b_scale_ptr, b_stride_n, b_stride_k)
    sizes = (rows, columns)
    tiles = (gl.cdiv(rows, 128), gl.cdiv(columns, 256))
    gl.warp_specialize([
        (producer, (a_desc, b_desc, tiles, blocks, ring, S, TOGETHER)),
        (consumer, (gl.constexpr(0), c_desc, scales, sizes, tiles, blocks, ring, c_tiles, S, TOGETHER)),
        (consumer, (gl.constexpr(1), c_desc, scales, sizes, tiles, blocks, ring, c_tiles, S, TOGETHER)),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip


def tiles_of(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """A descriptor that hands out tiles (rows, 128) of a matrix; beyond its end they are 0."""
    block = [rows, 128]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[tensor.dtype])
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def hopper_block_scaled(a: torch.Tensor, a_scales: torch.Tensor, b: SquareBlocks, c: torch.Tensor) -> None:
    """c (M, N), bfloat16 or float16, becomes the product of a (M, K) with a scale for each 128 of a row, and b (N, K).

    All three must be such that TMA can describe them (:func:`.tiles.describable`).
    """
    rows, columns = c.shape
    count = -(-rows // M) * -(-columns // N)
    hopper_block_scaled_kernel[(min(count, programs(a.device)),)](
        tiles_of(a, 64), tiles_of(b.values, 64), tiles_of(c, 64), a_scales, b.scales, rows, columns, a.shape[1] // K,
        *a_scales.stride(), *b.scales.stride(), S=STAGES, TOGETHER=TOGETHER, REGISTERS=MULTIPLYING, num_warps=4,
        maxnreg=LAUNCHED,
    )  # fmt: skip
