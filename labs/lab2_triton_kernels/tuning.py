"""Every number that tunes a kernel of this lab, in one place, with the measurement that chose it.

All on one H100 (Triton 3.6, PyTorch 2.11), bf16, tensors of 0.5 to 2 GiB, medians of interleaved rounds: the rate of
the least traffic relative to a device copy in the same rounds (3.02 TB/s). ``benchmarks/fused_operators.py`` and
``benchmarks/gemm.py`` record what the chosen numbers reach.

=========================  ======================================================================================
kernel                     tile (rows x columns, warps[, stages]): share of the copy
=========================  ======================================================================================
gelu                       2048, 8: 1.011   1024, 4: 1.009   4096, 4: 0.996   8192, 8: 0.994
bias_relu                  1x2048, 8: 1.009   8x1024, 16: 1.010   4x1024, 8: 1.006   4x1024, 4: 0.994
what L2 keeps              x evict_last, out evict_first: +0.005 to +0.008 for gelu, bias_relu, short softmax
weighted_sum               2x4096, 16: 1.033   2x2048, 8: 1.022   2x1024, 4: 1.010   1x8192, 4: 0.914
  gradient of x            1x2048, 4: 1.073   1x1024, 4: 1.019   (writes only; evict_first 1.084)
  gradient of the weight   2x1024, 4, 3: 0.997   the same, 1 stage: 0.92   4x1024, 8, 1: 0.913   (reads only)
  both in one kernel       8x1024, 8, 2: 0.955   4x1024, 8, 1: 0.907   4x512, 4, 1: 0.911
softmax, rows of 1024      4 rows, 4: 1.008   1 row, 2: 1.008   4 rows, 1: 0.982
  rows of 8192             16 warps: 1.009   8 warps: 1.007
  rows of 32768            32 warps: 0.954   16 warps: 0.922   8 warps: 0.700
online_softmax, 65536      8192, 16: 0.751   4096, 16: 0.687   4096, 4: 0.563   (of one read, though it makes two)
  rows of 262144           8192, 32: 0.665   8192, 16: 0.663   4096, 8: 0.619
multi_cta_softmax, 65536      pairs 8192, 4: 0.976   4096, 2: 0.966   16384, 8: 0.951   (64 registers 0.949)
  rows of 262144           pairs 4096, 2: 0.959   8192, 4: 0.952   16384, 8: 0.905
  rows of 1000000          pairs 8192, 4: 0.924   4096, 2: 0.812   16384, 8: 0.794
  float32, 65536, 262144   8192, 4: 0.980, 0.978   4096, 4: 0.972, 0.969
=========================  ======================================================================================

Products, relative to cuBLAS (785 TFLOP/s at 4096, 759 at 8192), for tiles m x n x k, warps, stages:

=========================================================  ======  ======
one program an SM, through descriptors                       4096    8192
=========================================================  ======  ======
128 x 256 x 64, 8, 4, groups of 8, halves, flattened        1.001   1.018
the same, groups of 16                                      0.997   1.023
128 x 256 x 64, 8, 3, whole, flattened                      0.986   1.019
128 x 256 x 64, 8, 4, halves, not flattened                 0.972   1.002
128 x 256 x 64, 8, 3, one tile a program                    0.969   1.001
128 x 128 x 64, 8, 4, flattened                             0.902   0.936
=========================================================  ======  ======

Through pointers, in TFLOP/s, groups of 8 (row by row):

=========================================================  ===========  ===========
128 x 256 x 64, 8, 4                                       748 (731)    747 (713)
128 x 256 x 64, 8, 3                                       684 (683)    661 (659)
128 x 128 x 64, 4, 4                                       626 (610)    626 (573)
128 x 128 x 64, 8, 3                                       600 (614)    548 (581)
=========================================================  ===========  ===========
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils import runtime


class Tile(NamedTuple):
    """Rows and columns that one program works on at a time, its warps, and stages of software pipelining."""

    rows: int
    block: int
    warps: int
    stages: int = 1


class MultiCtaConfig(NamedTuple):
    """Columns of a program's part of a row, its warps, and programs that an SM holds at so many registers a thread."""

    block: int
    warps: int
    programs_per_sm: int
    registers: int


class MatmulTile(NamedTuple):
    """Sides of a tile, rows of tiles in a group, warps, and stages of software pipelining.

    The last two are for descriptors: whether a tile is stored in two halves, and whether the loops over tiles and
    along K are flattened into one.
    """

    m: int
    n: int
    k: int
    group: int
    warps: int
    stages: int
    subtile: bool = False
    flatten: bool = True


#: Programs that a gradient's first stage aims at: eight for each SM of an H100. It is the same on every GPU, so that
#: the order of the sums is, too.
GRADIENT_PROGRAMS = runtime.pick(cpu=4, gpu=1056)
COLUMN_SUMS = runtime.pick(cpu=Tile(4, 128, 4), gpu=Tile(32, 32, 4))
#: Elements of the longest row that softmax keeps on chip.
SOFTMAX_ROW = runtime.pick(cpu=2048, gpu=32768)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n`` and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def _tile(columns: int, rows: int, block: int, warps: int, stages: int = 1) -> Tile:
    """A tile of ``rows`` x ``block``, or of fewer columns and more rows where rows are short."""
    narrow = min(block, max(16, power_of_two(columns)))
    return Tile(rows * block // narrow, narrow, warps, stages)


def gelu(columns: int) -> Tile:
    """Tile of gelu for rows of ``columns`` elements."""
    block, warps = runtime.pick(cpu=(1024, 4), gpu=(2048, 8))
    return Tile(1, min(block, max(16, power_of_two(columns))), warps)


def bias_relu(columns: int) -> Tile:
    """Tile of bias_relu for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(4, 256, 4), gpu=(1, 2048, 8)))


def bias_relu_backward(columns: int) -> Tile:
    """Tile of bias_relu's backward pass for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(4, 256, 4), gpu=(2, 1024, 4, 3)))


def weighted_sum(columns: int, capability: tuple[int, int] | None = None) -> Tile:
    """Tile of weighted_sum for rows of ``columns`` elements; ``capability``: of the GPU, by default of the one in use.

    For Blackwell the smaller tile was not measured: it is the one that does not spill.
    """
    if runtime.INTERPRET:
        return _tile(columns, 4, 256, 4)
    capability = capability or torch.cuda.get_device_capability()
    return _tile(columns, *((2, 2048, 8) if capability[0] == 10 else (2, 4096, 16)))


def weighted_sum_dx(columns: int) -> Tile:
    """Tile of the gradient of weighted_sum's x for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(4, 256, 4), gpu=(1, 2048, 4)))


def weighted_sum_dweight(columns: int) -> Tile:
    """Tile of the gradient of weighted_sum's weight, first stage, for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(4, 256, 4), gpu=(2, 1024, 4, 3)))


def row_splits(num_rows: int, columns: int, tile: Tile) -> tuple[int, int]:
    """How a gradient's first stage cuts the rows: number of splits, and tiles below one another in each."""
    tiles = -(-num_rows // tile.rows)
    blocks = -(-columns // tile.block)
    tiles_per_split = -(-tiles // max(1, GRADIENT_PROGRAMS // blocks))
    return -(-tiles // tiles_per_split), tiles_per_split


def softmax_fits(columns: int, element_size: int) -> bool:
    """Whether softmax keeps a row of ``columns`` elements on chip."""
    return columns <= SOFTMAX_ROW and columns * element_size <= 2 * SOFTMAX_ROW


def softmax_short(columns: int) -> Tile:
    """Tile of softmax for rows that fit."""
    block = max(16, power_of_two(columns))
    if runtime.INTERPRET:
        return Tile(max(1, 1024 // block), block, 4)
    if block <= 1024:
        return Tile(4096 // block, block, 4)
    return Tile(1, block, 4 if block <= 4096 else 16 if block <= 8192 else 32)


def online_softmax(columns: int) -> Tile:
    """Tile of online_softmax for rows of ``columns`` elements."""
    block, warps = runtime.pick(cpu=(1024, 4), gpu=(4096, 16) if columns <= 16384 else (8192, 16))
    return Tile(1, min(block, max(16, power_of_two(columns))), warps)


def multi_cta_softmax(columns: int, pairs: bool) -> MultiCtaConfig:
    """How multi_cta_softmax shares out rows of ``columns`` elements: in pairs of 16 bits each, or one by one."""
    if not pairs:
        return MultiCtaConfig(8192, 4, 4, 112)
    return MultiCtaConfig(4096, 2, 14, 72) if 131072 < columns <= 524288 else MultiCtaConfig(8192, 4, 7, 72)


def tiled_matmul(element_size: int, capability: tuple[int, int] | None = None) -> MatmulTile:
    """Tile of the product through pointers: as large as the shared memory of the GPU's multiprocessors allows.

    Args:
        element_size: Bytes of an element.
        capability: Of the GPU; by default of the one in use.
    """
    if runtime.INTERPRET:
        return MatmulTile(32, 32, 32, 2, 4, 1)
    if element_size == 4:  # short steps along K: each is a sum of its own, and long sums lose digits
        return MatmulTile(64, 64, 16, 8, 4, 3)
    capability = capability or torch.cuda.get_device_capability()
    if capability[0] in (9, 10):  # 227 KiB
        return MatmulTile(128, 256, 64, 8, 8, 4)
    return MatmulTile(128, 256, 64, 8, 8, 3) if capability == (8, 0) else MatmulTile(128, 128, 64, 8, 8, 3)


def descriptor_matmul(element_size: int) -> MatmulTile:
    """Tile of the product through descriptors."""
    if runtime.INTERPRET:
        return MatmulTile(32, 32, 32, 2, 4, 1)
    return MatmulTile(128, 256, 64, 8, 8, 4, subtile=True) if element_size == 2 else MatmulTile(64, 64, 16, 8, 8, 3)
