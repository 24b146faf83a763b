"""The product with scales for rows on Hopper: one warpgroup loads, two multiply, and programs are persistent.

A warpgroup accumulates 64 x 256 sums, 128 registers per thread, and scales them on their way out. Meanwhile the other
warpgroup multiplies, and the operands of the next tile arrive.

The sums over all of K stay in the tensor cores, as those of ``torch._scaled_mm`` with fast accumulation do. The record
``frontier_kernels`` has both.
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
from .tiles import programs

#: Registers per thread of a warpgroup that multiplies.
MULTIPLYING = 232


@gluon.jit
def multiply(GROUP: gl.constexpr, acc, step, ring, S: gl.constexpr, FIRST: gl.constexpr):
    """The product of one stage is under way; that of the stage before, unless this is the first, has left its stage."""
    a_tiles, b_tiles, full, empty = ring
    s = step % S
    mbarrier.wait(full.index(s), (step // S) & 1)
    a = a_tiles.index(s).slice(GROUP * 64, 64)
    acc = warpgroup_mma(a, b_tiles.index(s).permute((1, 0)), acc, use_acc=not FIRST, is_async=True)
    acc = warpgroup_mma_wait(1, [acc])
    if not FIRST:
        mbarrier.arrive(empty.index((step + S - 1) % S))
    return acc


@gluon.jit
def scaled(part, a_scale, b_scales, first):
    """64 x 64 sums times the scales of their rows and columns."""
    b_scale = b_scales.slice(first, 64).load(gl.SliceLayout(0, part.type.layout))
    return part * a_scale[:, None] * b_scale[None, :]


@gluon.jit
def consumer(GROUP: gl.constexpr, c_desc, scales, sizes, tiles, steps, ring, c_tiles, b_scale_tiles, S: gl.constexpr,
             TOGETHER: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 rows of each tile."""
    _a_tiles, _b_tiles, _full, empty = ring
    a_scale_ptr, a_stride, b_scale_ptr, b_stride = scales
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
    COLUMNS: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    c_even = c_tiles.index(GROUP * 2)
    c_odd = c_tiles.index(GROUP * 2 + 1)
    b_scales = b_scale_tiles.slice(GROUP * 256, 256)
    step = 0
    for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        row, column = place(tile, tiles[0], tiles[1], TOGETHER)
        row += GROUP * 64
        rows = gl.minimum(row + gl.arange(0, 64, layout=ROWS), sizes[0] - 1)  # beyond the ends anything will do
        columns = gl.minimum(column + gl.arange(0, 256, layout=COLUMNS), sizes[1] - 1)
        a_scale = gl.load(a_scale_ptr + rows * a_stride)  # (64,), on its way while the tensor cores work
        b_scale = gl.load(b_scale_ptr + columns * b_stride)  # (256,), likewise
        acc = multiply(GROUP, gl.zeros([64, 256], gl.float32, ACC), step, ring, S, gl.constexpr(True))
        step += 1
        for _ in range(1, steps):
            acc = multiply(GROUP, acc, step, ring, S, gl.constexpr(False))
            step += 1
        wait_for_all()  # all have read the scales of the tile before
        b_scales.store(b_scale)
        wait_for_all()
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((step + S - 1) % S))
        left, right = halves(acc)
        first, second = halves(left)
        store(scaled(first, a_scale, b_scales, 0), c_desc, c_even, row, column)
        store(scaled(second, a_scale, b_scales, 64), c_desc, c_odd, row, column + 64)
        first, second = halves(right)
        store(scaled(first, a_scale, b_scales, 128), c_desc, c_even, row, column + 128)
        store(scaled(second, a_scale, b_scales, 192), c_desc, c_odd, row, column + 192)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "columns", "steps"])
def hopper_row_scaled_kernel(a_desc, b_desc, c_desc, a_scale_ptr, b_scale_ptr, rows, columns, steps, a_stride, b_stride,
                             S: gl.constexpr, TOGETHER: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    """Every ``num_programs``-th tile of c."""
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [S, 128, 128], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [S, 256, 128], b_desc.layout)
    c_tiles = gl.allocate_shared_memory(c_desc.dtype, [4, 64, 64], c_desc.layout)
    b_scale_tiles = gl.allocate_shared_memory(gl.float32, [512], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = (a_tiles, b_tiles, barriers(S, 1), barriers(S, 2))
    fence_async_shared()
    wait_for_all()
    scales = (a_scale_ptr, a_stride, b_scale_ptr, b_stride)
    sizes = (rows, columns)
    tiles = (gl.cdiv(rows, 128), gl.cdiv(columns, 256))
    gl.warp_specialize([
        (producer, (a_desc, b_desc, tiles, steps, ring, S, TOGETHER)),
        (consumer, (gl.constexpr(0), c_desc, scales, sizes, tiles, steps, ring, c_tiles, b_scale_tiles, S, TOGETHER)),
        (consumer, (gl.constexpr(1), c_desc, scales, sizes, tiles, steps, ring, c_tiles, b_scale_tiles, S, TOGETHER)),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip


def hopper_row_scaled(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, c: torch.Tensor
) -> None:
    """c (M, N), bfloat16 or float16, becomes the product of a (M, K) and b (N, K), each with one scale or one per row.

    a, b and c must be such that TMA can describe them (:func:`.tiles.aligned`), and the :func:`.tiles.extent` of
    the scales less than 2^31.
    """
    rows, columns = c.shape
    count = -(-rows // M) * -(-columns // N)
    strides = (scales.stride(0) if scales.ndim else 0 for scales in (a_scales, b_scales))
    launch(
        hopper_row_scaled_kernel, min(count, programs(a.device)), tiles_of(a, M, K), tiles_of(b, N, K),
        tiles_of(c, 64, 64), a_scales, b_scales, rows, columns, -(-a.shape[1] // K), *strides, STAGES, TOGETHER,
        MULTIPLYING,
    )  # fmt: skip
