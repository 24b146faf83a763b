"""What the products of e4m3 matrices on Hopper share: the order of tiles, the warp that loads, the way out, the launch.

A program takes one tile of c after another, 128 rows and 256 columns each. One warpgroup loads, 128 of K at a time, and
two multiply, 64 rows each. At the tensor core's full rate, a tile of this shape takes 48 bytes of operands per cycle
from the L2 cache; one of 128 x 128 would take 64.
"""

from __future__ import annotations

import functools

import torch
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction, driver

from solutions.capstone_hopper.parts import wait_for_all

#: Rows and columns of a tile, K of a stage, stages of operands, rows of tiles taken together.
M, N, K, STAGES, TOGETHER = 128, 256, 128, 4, 8
#: Registers per thread at the launch. The warps that multiply get more, and the one that loads gives its own away.
LAUNCHED = 168
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
def producer(a_desc, b_desc, tiles, steps, ring, S: gl.constexpr, TOGETHER: gl.constexpr):
    """One warp: asks TMA for the operands of the next 128 of K, whenever a stage is free."""
    a_tiles, b_tiles, full, empty = ring
    step = 0
    for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        row, column = place(tile, tiles[0], tiles[1], TOGETHER)
        for k in range(steps):
            s = step % S
            mbarrier.wait(empty.index(s), ((step // S) & 1) ^ 1)
            mbarrier.expect(full.index(s), (128 + 256) * 128)
            tma.async_copy_global_to_shared(a_desc, [row, k * 128], full.index(s), a_tiles.index(s))
            tma.async_copy_global_to_shared(b_desc, [column, k * 128], full.index(s), b_tiles.index(s))
            step += 1


@gluon.jit
def halves(x):
    """The left and the right half of a warpgroup's columns."""
    C: gl.constexpr = x.shape[1] // 2
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 32])
    left, right = gl.split(gl.permute(gl.reshape(x, [64, 2, C]), (0, 2, 1)))
    return gl.convert_layout(left, HALF), gl.convert_layout(right, HALF)


@gluon.jit
def store(part, c_desc, c_tile, row, column):
    """64 x 64 numbers of c through one of two buffers in turn, once the store before the last has been read from it."""
    tma.store_wait(1)
    wait_for_all()
    c_tile.store(part.to(c_tile.dtype))
    fence_async_shared()
    wait_for_all()
    tma.async_copy_shared_to_global(c_desc, [row, column], c_tile)


@functools.cache
def layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How TMA lays out a tile so that the tensor cores read it without bank conflicts."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], ELEMENTS[dtype])


def tiles_of(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor that hands out tiles (rows, columns) of a matrix; beyond its end they are 0."""
    block = [rows, columns]
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), block, layout(rows, columns, tensor.dtype)
    )


#: Compiled kernels by the kind of their launches.
compiled: dict[tuple, CompiledKernel] = {}


def launch(
    kernel: JITFunction, count: int, a: TensorDescriptor, b: TensorDescriptor, c: TensorDescriptor,
    a_scales: torch.Tensor, b_scales: torch.Tensor, *arguments: int,
) -> None:  # fmt: skip
    """Launch ``count`` programs. Triton searches for the compiled kernel at the first launch of a kind only.

    The search takes the host longer than the rest of a launch. What it finds depends on the GPU, on the dtype of c, and
    on the strides and the alignment of the scales. Sizes do not matter; a and b are in e4m3, scales in float32.
    """
    kind = (kernel.__name__, driver.active.get_current_device(), c.base.dtype)
    kind += tuple((scales.stride(), scales.data_ptr() % 16) for scales in (a_scales, b_scales))
    known = compiled.get(kind)
    if known is None:
        compiled[kind] = kernel[(count,)](a, b, c, a_scales, b_scales, *arguments, num_warps=4, maxnreg=LAUNCHED)
    else:
        known[(count, 1, 1)](a, b, c, a_scales, b_scales, *arguments)
