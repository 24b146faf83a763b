"""The product of an expert layer on Hopper: one warpgroup loads, two multiply, and programs are persistent.

A tile has 128 rows of one expert and 256 columns. Each warpgroup that multiplies accumulates 64 x 256 sums of it, 128
registers per thread. The warpgroup that loads asks TMA for the operands, 64 of K at a time, and keeps a ring of four
stages full. There is one program for each SM, and it takes every ``num_programs``-th tile. While a tile is stored, the
operands of the next are already on their way.

The last tile of an expert may have fewer rows. TMA then brings rows of the next expert along. They are multiplied but
not stored. A row of the result depends on one row of x only, so it does not matter which numbers they hold. If a
warpgroup has no row of the expert at all, it multiplies nothing and only sets the stages free.

``full`` barriers count the bytes that TMA has brought; ``empty`` ones say that both warpgroups have used a stage.

The same product with transposed matrices is the gradient of x. :mod:`.hopper_grouped_gradient` computes that of the
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
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

from solutions.capstone_hopper.parts import barriers, layout, wait_for_all

from .expert_tables import tile_table
from .tiles import describable, programs

#: Rows and columns of a tile, K of a stage, stages of operands, rows of tiles taken together.
M, N, K, STAGES, TOGETHER = 128, 256, 64, 4, 8
#: Registers per thread: of the launch, of a warpgroup that multiplies. The warpgroup that loads keeps 40.
LAUNCHED, MULTIPLYING = 168, 232


@gluon.jit
def tile_of(number, table_ptr, sizes, TOGETHER: gl.constexpr):
    """Expert, first row, number of rows and first column of a tile: ``TOGETHER`` rows of tiles column by column."""
    length, tiles_m, tiles_n, _steps, _rows_each = sizes
    group = TOGETHER * tiles_n
    first = number // group * TOGETHER
    inside = number % group
    together = gl.maximum(gl.minimum(tiles_m - first, TOGETHER), 1)
    entry = table_ptr + (first + inside % together)
    return gl.load(entry), gl.load(entry + length), gl.load(entry + 2 * length), inside // together * 256


@gluon.jit
def producer(x_desc, weights_desc, table_ptr, sizes, ring, S: gl.constexpr, TRANSPOSED: gl.constexpr,
             TOGETHER: gl.constexpr):  # fmt: skip
    """One warp: asks TMA for the operands of the next 64 of K, whenever a stage is free."""
    x_tiles, weight_tiles, full, empty = ring
    _length, tiles_m, tiles_n, steps, rows_each = sizes
    step = 0
    for number in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        expert, row, _rows, column = tile_of(number, table_ptr, sizes, TOGETHER)
        for k in range(steps):
            s = step % S
            mbarrier.wait(empty.index(s), ((step // S) & 1) ^ 1)
            mbarrier.expect(full.index(s), (128 + 256) * 64 * 2)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(x_desc, [row + half * 64, k * 64], full.index(s),
                                                x_tiles.index(s * 2 + half))  # fmt: skip
            if TRANSPOSED:
                place = [expert * rows_each + column, k * 64]
            else:
                place = [expert * rows_each + k * 64, column]
            tma.async_copy_global_to_shared(weights_desc, place, full.index(s), weight_tiles.index(s))
            step += 1


@gluon.jit
def multiply(GROUP: gl.constexpr, first, steps, ring, S: gl.constexpr, TRANSPOSED: gl.constexpr):
    """64 x 256 sums over ``steps`` stages from number ``first`` on.

    A stage is set free when its product is done, while the next one is under way.
    """
    x_tiles, weight_tiles, full, empty = ring
    acc = gl.zeros([64, 256], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
    step = first
    for k in range(steps):
        s = step % S
        mbarrier.wait(full.index(s), (step // S) & 1)
        weights = weight_tiles.index(s)  # (64, 256), or transposed
        if TRANSPOSED:
            acc = warpgroup_mma(x_tiles.index(s * 2 + GROUP), weights.permute((1, 0)), acc, is_async=True)
        else:
            acc = warpgroup_mma(x_tiles.index(s * 2 + GROUP), weights, acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        mbarrier.arrive(empty.index((step + S - 1) % S), pred=k > 0)
        step += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((step + S - 1) % S))
    return acc


@gluon.jit
def skip(first, steps, ring, S: gl.constexpr):
    """Set free the stages of a tile in which this warpgroup has no row."""
    _x_tiles, _weight_tiles, full, empty = ring
    for step in range(first, first + steps):
        mbarrier.wait(full.index(step % S), (step // S) & 1)
        mbarrier.arrive(empty.index(step % S))


@gluon.jit
def halves(acc):
    """The left and the right 128 columns of a warpgroup's sums (64, 256)."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    left, right = gl.split(gl.permute(gl.reshape(acc, [64, 2, 128]), (0, 2, 1)))
    return gl.convert_layout(left, HALF), gl.convert_layout(right, HALF)


@gluon.jit
def store_all(half, out_desc, out_tile, row, column):
    """64 x 128 numbers through shared memory, once what was there has left it."""
    tma.store_wait(0)
    wait_for_all()
    out_tile.store(half.to(out_tile.dtype))
    fence_async_shared()
    wait_for_all()
    tma.async_copy_shared_to_global(out_desc, [row, column], out_tile)


@gluon.jit
def store(half, out_desc, out_ptr, out_tile, row, rows, column, columns):
    """64 x 128 numbers, of which only the first ``rows`` rows are the expert's; the others must not be written."""
    if rows >= 64:
        store_all(half, out_desc, out_tile, row, column)
    else:
        HELD: gl.constexpr = half.type.layout
        r = gl.arange(0, 64, layout=gl.SliceLayout(1, HELD))
        c = gl.arange(0, 128, layout=gl.SliceLayout(0, HELD))
        place = (row + r).to(gl.int64) * columns + column
        # one addition to the pointer: Triton 3.6's compiler fails on two
        gl.store(out_ptr + (place[:, None] + c[None, :]), half.to(out_tile.dtype), mask=(r < rows)[:, None])


@gluon.jit
def consumer(GROUP: gl.constexpr, out_desc, out_ptr, table_ptr, sizes, ring, out_tiles, S: gl.constexpr,
             TRANSPOSED: gl.constexpr, TOGETHER: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 rows of each tile. What the table says of the next tile is read a tile ahead."""
    _length, tiles_m, tiles_n, steps, _rows_each = sizes
    out_tile = out_tiles.index(GROUP)
    last = gl.maximum(tiles_m * tiles_n - 1, 0)
    step = 0
    _expert, next_row, next_rows, next_column = tile_of(
        gl.minimum(gl.program_id(0), last), table_ptr, sizes, TOGETHER
    )  # fmt: skip
    for number in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row = next_row + GROUP * 64
        rows = next_rows - GROUP * 64
        column = next_column
        _expert, next_row, next_rows, next_column = tile_of(
            gl.minimum(number + gl.num_programs(0), last), table_ptr, sizes, TOGETHER
        )  # fmt: skip
        if rows > 0:
            left, right = halves(multiply(GROUP, step, steps, ring, S, TRANSPOSED))
            store(left, out_desc, out_ptr, out_tile, row, rows, column, tiles_n * 256)
            store(right, out_desc, out_ptr, out_tile, row, rows, column + 128, tiles_n * 256)
        else:
            skip(step, steps, ring, S)
        step += steps
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["length", "tiles_n", "steps", "rows_each"])
def hopper_grouped_matmul_kernel(
    x_desc, weights_desc, out_desc, out_ptr, table_ptr, tiles_ptr, length, tiles_n, steps, rows_each,
    S: gl.constexpr, TRANSPOSED: gl.constexpr, TOGETHER: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Every ``num_programs``-th tile of out (T, N). ``rows_each``: rows of ``weights_desc`` that are one expert's."""
    dtype: gl.constexpr = x_desc.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [2 * S, 64, 64], x_desc.layout)
    weight_tiles = gl.allocate_shared_memory(dtype, [S, 256, 64] if TRANSPOSED else [S, 64, 256], weights_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, 64, 128], out_desc.layout)
    ring = (x_tiles, weight_tiles, barriers(S, 1), barriers(S, 2))
    fence_async_shared()
    wait_for_all()
    sizes = (length, gl.load(tiles_ptr), tiles_n, steps, rows_each)
    gl.warp_specialize([
        (producer, (x_desc, weights_desc, table_ptr, sizes, ring, S, TRANSPOSED, TOGETHER)),
        (consumer, (gl.constexpr(0), out_desc, out_ptr, table_ptr, sizes, ring, out_tiles, S, TRANSPOSED, TOGETHER)),
        (consumer, (gl.constexpr(1), out_desc, out_ptr, table_ptr, sizes, ring, out_tiles, S, TRANSPOSED, TOGETHER)),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip


def as_one_matrix(weights: Tensor) -> tuple[Tensor | None, bool]:
    """``weights`` (E, K, N) as one matrix (E K, N), or as its transposed form (E N, K), and whether it is that.

    None where the experts' matrices do not lie in memory like one.
    """
    for matrices, transposed in ((weights, False), (weights.mT, True)):
        experts, rows, columns = matrices.shape
        if matrices.stride(2) == 1 and (experts == 1 or matrices.stride(0) == rows * matrices.stride(1)):
            return matrices.as_strided((experts * rows, columns), (matrices.stride(1), 1)), transposed
    return None, False


def why_portable(x: Tensor, weights: Tensor) -> str:
    """Why the kernel for every GPU has to multiply x (T, K) and weights (E, K, N), or nothing if this one can."""
    inner, columns = weights.shape[1:]
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "numbers are neither bfloat16 nor float16"
    if inner % K or columns % N:
        return f"K is no multiple of {K}, or N none of {N}"
    matrix, _ = as_one_matrix(weights)
    if matrix is None:
        return "the experts' matrices do not lie one after another"
    if not (describable(x) and describable(matrix)):
        return "TMA reads rows without gaps, multiples of 16 bytes apart"
    return ""


def tiles_of(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor that hands out tiles (rows, columns) of a matrix; beyond its end they are 0."""
    block = [rows, columns]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout(block, tensor.dtype))


def hopper_grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor, out: Tensor) -> None:
    """``out`` (T, N), contiguous, becomes the product of each expert's rows of x and its matrix.

    T must not be 0, and x (T, K) and weights (E, K, N) such that :func:`why_portable` has nothing to say.
    """
    (rows, columns), inner = out.shape, x.shape[1]
    matrix, transposed = as_one_matrix(weights)
    table, tiles = tile_table(counts, rows, M)
    hopper_grouped_matmul_kernel[(programs(x.device),)](
        tiles_of(x, 64, K), tiles_of(matrix, *((N, K) if transposed else (K, N))), tiles_of(out, 64, N // 2), out,
        table, tiles, table.shape[1], columns // N, inner // K, columns if transposed else inner,
        S=STAGES, TRANSPOSED=transposed, TOGETHER=TOGETHER, REGISTERS=MULTIPLYING, num_warps=4, maxnreg=LAUNCHED,
    )  # fmt: skip
