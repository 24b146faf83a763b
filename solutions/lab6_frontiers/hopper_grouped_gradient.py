"""The gradient of an expert layer's weights on Hopper: x^T dout of each expert's rows.

Programs, warps and stages are those of :mod:`.hopper_grouped_matmul`. The sums run over the rows of an expert: the more
it has, the longer its tiles take. The experts with most rows come first, so that the tiles at the end are short. An
expert without rows has no step, and its gradient is 0.

The last step of an expert may bring rows of the next expert along. Here they would be added to the sums. Both operands
are therefore set to 0 from the expert's end on; if only one were, a NaN in the other would still make the sum NaN. Each
warpgroup zeroes its own half of x, and one half of dout, which both read. The barrier ``zeroed`` says that both have
done so.
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

from solutions.capstone_hopper.parts import barriers, wait_for_all

from .expert_tables import largest_first
from .hopper_grouped_matmul import LAUNCHED, MULTIPLYING, STAGES, halves, store_all, tiles_of
from .tiles import describable, programs

#: Sides of a tile of an expert's gradient (K, N), and rows of x and dout in a stage.
K, N, M = 128, 256, 64


@gluon.jit
def gradient_tile(number, table_ptr, sizes):
    """Expert, its first row, its number of rows, and first row and column of a tile of its gradient."""
    experts, tiles_k, tiles_n = sizes
    of_expert = tiles_k * tiles_n
    inside = number % of_expert
    entry = table_ptr + number // of_expert
    expert = gl.load(entry)
    begin = gl.load(entry + experts)
    rows = gl.load(entry + 2 * experts)
    return expert, begin, rows, inside % tiles_k * 128, inside // tiles_k * 256


@gluon.jit
def gradient_producer(x_desc, dout_desc, table_ptr, sizes, ring, S: gl.constexpr):
    """One warp: asks TMA for the next 64 rows of both operands, whenever a stage is free."""
    x_tiles, dout_tiles, full, empty, _zeroed = ring
    experts, tiles_k, tiles_n = sizes
    step = 0
    for number in range(gl.program_id(0), experts * tiles_k * tiles_n, gl.num_programs(0)):
        _expert, begin, rows, k, n = gradient_tile(number, table_ptr, sizes)
        for row in range(begin, begin + rows, 64):
            s = step % S
            mbarrier.wait(empty.index(s), ((step // S) & 1) ^ 1)
            mbarrier.expect(full.index(s), (128 + 256) * 64 * 2)
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(x_desc, [row, k + half * 64], full.index(s),
                                                x_tiles.index(s * 2 + half))  # fmt: skip
            tma.async_copy_global_to_shared(dout_desc, [row, n], full.index(s), dout_tiles.index(s))
            step += 1


@gluon.jit
def zero_rows(tile, valid):
    """Zeros in the rows of a tile from ``valid`` on."""
    HELD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, HELD))
    tile.store(gl.where((row < valid)[:, None], tile.load(HELD), 0.0).to(tile.dtype))


@gluon.jit
def gradient_sums(GROUP: gl.constexpr, first, rows, zeroings, ring, S: gl.constexpr):
    """64 x 256 sums over ``rows`` rows, in stages from number ``first`` on, after ``zeroings`` zeroings."""
    x_tiles, dout_tiles, full, empty, zeroed = ring
    acc = gl.zeros([64, 256], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
    step = first
    for row in range(0, rows, 64):
        s = step % S
        mbarrier.wait(full.index(s), (step // S) & 1)
        if row + 64 > rows:
            zero_rows(x_tiles.index(s * 2 + GROUP), rows - row)
            zero_rows(dout_tiles.index(s).slice(GROUP * 128, 128, 1), rows - row)
            fence_async_shared()
            wait_for_all()
            mbarrier.arrive(zeroed.index(0))
            mbarrier.wait(zeroed.index(0), zeroings & 1)
        acc = warpgroup_mma(x_tiles.index(s * 2 + GROUP).permute((1, 0)), dout_tiles.index(s), acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        mbarrier.arrive(empty.index((step + S - 1) % S), pred=row > 0)
        step += 1
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(empty.index((step + S - 1) % S), pred=rows > 0)
    return acc


@gluon.jit
def gradient_consumer(GROUP: gl.constexpr, out_desc, table_ptr, sizes, ring, out_tiles, S: gl.constexpr):
    """One warpgroup: 64 rows of each tile of a gradient. What the table says of the next is read a tile ahead."""
    experts, tiles_k, tiles_n = sizes
    out_tile = out_tiles.index(GROUP)
    last = experts * tiles_k * tiles_n - 1
    step = 0
    zeroings = 0
    next_expert, _begin, next_rows, next_k, next_n = gradient_tile(
        gl.minimum(gl.program_id(0), last), table_ptr, sizes
    )  # fmt: skip
    for number in range(gl.program_id(0), last + 1, gl.num_programs(0)):
        rows = next_rows
        out_row = next_expert * (tiles_k * 128) + next_k + GROUP * 64
        column = next_n
        next_expert, _begin, next_rows, next_k, next_n = gradient_tile(
            gl.minimum(number + gl.num_programs(0), last), table_ptr, sizes
        )  # fmt: skip
        left, right = halves(gradient_sums(GROUP, step, rows, zeroings, ring, S))
        store_all(left, out_desc, out_tile, out_row, column)
        store_all(right, out_desc, out_tile, out_row, column + 128)
        step += gl.cdiv(rows, 64)
        zeroings += (rows % 64 + 63) // 64  # one if the last step is not full
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "tiles_k", "tiles_n"])
def hopper_grouped_gradient_kernel(
    x_desc, dout_desc, out_desc, table_ptr, experts, tiles_k, tiles_n, S: gl.constexpr, REGISTERS: gl.constexpr
):  # fmt: skip
    """Every ``num_programs``-th tile of the gradients (E K, N)."""
    dtype: gl.constexpr = x_desc.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [2 * S, 64, 64], x_desc.layout)
    dout_tiles = gl.allocate_shared_memory(dtype, [S, 64, 256], dout_desc.layout)
    out_tiles = gl.allocate_shared_memory(dtype, [2, 64, 128], out_desc.layout)
    ring = (x_tiles, dout_tiles, barriers(S, 1), barriers(S, 2), barriers(1, 2))
    fence_async_shared()
    wait_for_all()
    sizes = (experts, tiles_k, tiles_n)
    gl.warp_specialize([
        (gradient_producer, (x_desc, dout_desc, table_ptr, sizes, ring, S)),
        (gradient_consumer, (gl.constexpr(0), out_desc, table_ptr, sizes, ring, out_tiles, S)),
        (gradient_consumer, (gl.constexpr(1), out_desc, table_ptr, sizes, ring, out_tiles, S)),
    ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip


def why_portable(x: Tensor, dout: Tensor) -> str:
    """Why the kernel for every GPU has to multiply x (T, K) and dout (T, N), or nothing if this one can."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "numbers are neither bfloat16 nor float16"
    if not len(x):
        return "there are no rows"
    if x.shape[1] % K or dout.shape[1] % N:
        return f"K is no multiple of {K}, or N none of {N}"
    if not (describable(x) and describable(dout)):
        return "TMA reads rows without gaps, multiples of 16 bytes apart"
    return ""


def hopper_grouped_gradient(x: Tensor, dout: Tensor, counts: Tensor, out: Tensor) -> None:
    """``out`` (E, K, N), contiguous, becomes x^T dout of each expert's rows.

    x (T, K) and dout (T, N) must be such that :func:`why_portable` has nothing to say.
    """
    experts, inner, columns = out.shape
    hopper_grouped_gradient_kernel[(programs(x.device),)](
        tiles_of(x, M, 64), tiles_of(dout, M, N), tiles_of(out.view(experts * inner, columns), 64, N // 2),
        largest_first(counts), experts, inner // K, columns // N, S=STAGES, REGISTERS=MULTIPLYING, num_warps=4,
        maxnreg=LAUNCHED,
    )  # fmt: skip
