"""A matrix product by a producer warp and a consumer warpgroup, in Gluon (exercise 7.1).

Shared memory holds a ring of ``STAGES`` stages. A stage is a tile of A and a tile of B, with two barriers: ``full[s]``
completes a phase when TMA has written both tiles, ``empty[s]`` when the consumer has arrived, since the tiles may then
be overwritten.
"""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.gluon import launch

from .arguments import check_arguments, descriptor_of

from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)  # fmt: skip

#: Rows, columns and depth of a tile.
TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
#: Four warps are the consumer's; ``maxnreg`` is what each thread of the program starts with.
OPTIONS = {"num_warps": 4, "maxnreg": 128}


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """``COUNT`` barriers in shared memory, each of which completes a phase when one has arrived."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), 1)
    return made


@gluon.jit
def producer(a_desc, b_desc, ring, row, column, num_tiles, BLOCK_K: gl.constexpr, STAGES: gl.constexpr):
    """One warp: asks TMA for tile after tile of A and B, each as soon as its stage is empty."""
    a_tiles, b_tiles, full, empty = ring
    for i in range(num_tiles):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(a_desc, [row, i * BLOCK_K], full.index(stage), a_tiles.index(stage))
        tma.async_copy_global_to_shared(b_desc, [column, i * BLOCK_K], full.index(stage), b_tiles.index(stage))


@gluon.jit
def consumer(
    c_desc, c_tile, ring, row, column, num_tiles, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: adds up the products of all tiles, and has TMA write the sum to C at (row, column)."""
    a_tiles, b_tiles, full, empty = ring  # (STAGES, BLOCK_M, BLOCK_K), (STAGES, BLOCK_N, BLOCK_K), STAGES barriers each
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])  # where wgmma leaves its result
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, ACC)
    ### BEGIN SOLUTION 7.1: the consumer
    for i in range(num_tiles):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        acc = warpgroup_mma(a_tiles.index(stage), b_tiles.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])  # product i is under way, product i - 1 has read its tiles
        if i > 0:
            mbarrier.arrive(empty.index((i - 1) % STAGES))
    acc = warpgroup_mma_wait(0, [acc])
    c_tile.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [row, column], c_tile)
    tma.store_wait(0)
    ### END SOLUTION


@gluon.jit
def matmul_kernel(
    a_desc, b_desc, c_desc, num_tiles, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One program: a tile (BLOCK_M, BLOCK_N) of C. It lays out shared memory and gives each warp its work."""
    row, column = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, [BLOCK_M, BLOCK_N], c_desc.layout)
    ring = (a_tiles, b_tiles, barriers(STAGES), barriers(STAGES))
    fence_async_shared()  # TMA sees the barriers
    gl.warp_specialize([
        (consumer, (c_desc, c_tile, ring, row, column, num_tiles, BLOCK_M, BLOCK_N, STAGES)),
        (producer, (a_desc, b_desc, ring, row, column, num_tiles, BLOCK_K, STAGES)),
    ], [1], [24])  # fmt: skip  # the producer: one warp, 24 registers a thread


def multiply(a: torch.Tensor, b: torch.Tensor, stages: int = 4) -> torch.Tensor:
    """The product A B^T, (M, N), in bfloat16: on a Hopper GPU if the tensors are on one, else in the emulator.

    Args:
        a: (M, K), bfloat16, contiguous.
        b: (N, K), likewise. K and N are multiples of 8: TMA counts in units of 16 bytes.
        stages: Of the ring, 2 to 4.

    Raises:
        TypeError, ValueError: the arguments are not like that.
    """
    check_arguments(a, b, stages)
    (M, K), N = a.shape, b.shape[0]
    BLOCK_M, BLOCK_N, BLOCK_K = TILE.values()
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    launch(
        matmul_kernel, (-(-M // BLOCK_M), -(-N // BLOCK_N)),
        descriptor_of(a, BLOCK_M, BLOCK_K), descriptor_of(b, BLOCK_N, BLOCK_K), descriptor_of(c, BLOCK_M, BLOCK_N),
        -(-K // BLOCK_K), STAGES=stages, **TILE, **OPTIONS,
    )  # fmt: skip
    return c
