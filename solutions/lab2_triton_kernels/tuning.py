"""Every number that tunes a kernel of this lab, in one place."""

from __future__ import annotations

from typing import NamedTuple

from utils import runtime


class Tile(NamedTuple):
    """Rows and columns that one program works on at a time, its warps, and stages of software pipelining."""

    rows: int
    block: int
    warps: int
    stages: int = 1


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
    halves: bool = False
    flatten: bool = True


#: Programs that a gradient's first stage aims at: eight for each SM of an H100. It is the same on every GPU, so that
#: the order of the sums is, too.
GRADIENT_PROGRAMS = runtime.pick(cpu=4, gpu=1056)
COLUMN_SUMS = runtime.pick(cpu=Tile(4, 128, 4), gpu=Tile(32, 32, 4))
#: Elements of the longest row that softmax keeps on chip.
SOFTMAX_ROW = runtime.pick(cpu=2048, gpu=32768)
#: Of spread_softmax: how many programs fit an SM at the same time when each thread has so many registers.
SPREAD_PROGRAMS_PER_SM = 3
SPREAD_REGISTERS = 80


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
    return _tile(columns, *runtime.pick(cpu=(4, 256, 4), gpu=(8, 1024, 16)))


def bias_relu_backward(columns: int) -> Tile:
    """Tile of bias_relu's backward pass for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(4, 256, 4), gpu=(2, 1024, 4, 3)))


def weighted_sum(columns: int) -> Tile:
    """Tile of weighted_sum for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(4, 256, 4), gpu=(2, 4096, 16)))


def weighted_sum_dx(columns: int) -> Tile:
    """Tile of the gradient of weighted_sum's x for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(4, 256, 4), gpu=(1, 2048, 4)))


def weighted_sum_dweight(columns: int) -> Tile:
    """Tile of the gradient of weighted_sum's weight, first stage, for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(4, 256, 4), gpu=(2, 1024, 4, 3)))


def strips(num_rows: int, columns: int, tile: Tile) -> tuple[int, int]:
    """How a gradient's first stage cuts the rows: number of strips, and tiles below one another in each."""
    tiles = -(-num_rows // tile.rows)
    blocks = -(-columns // tile.block)
    tiles_per_strip = -(-tiles // max(1, GRADIENT_PROGRAMS // blocks))
    return -(-tiles // tiles_per_strip), tiles_per_strip


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


def spread_softmax(element_size: int) -> Tile:
    """Tile of spread_softmax."""
    return Tile(1, 8192, 8) if element_size == 2 else Tile(1, 4096, 8)


def tiled_matmul(element_size: int) -> MatmulTile:
    """Tile of the product through pointers."""
    if runtime.INTERPRET:
        return MatmulTile(32, 32, 32, 2, 4, 1)
    return MatmulTile(128, 128, 64, 8, 8, 3) if element_size == 2 else MatmulTile(64, 64, 32, 8, 4, 3)


def descriptor_matmul(element_size: int) -> MatmulTile:
    """Tile of the product through descriptors."""
    if runtime.INTERPRET:
        return MatmulTile(32, 32, 32, 2, 4, 1)
    return MatmulTile(128, 256, 64, 8, 8, 4, halves=True) if element_size == 2 else MatmulTile(64, 64, 32, 8, 4, 3)


SPREAD_SOFTMAX = Tile(1, 4096, 4)
SPREAD_PROGRAMS_PER_SM = 6
SPREAD_REGISTERS = 80
