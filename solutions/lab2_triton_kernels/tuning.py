"""Every number that tunes a kernel of this lab, in one place."""

from __future__ import annotations

from typing import NamedTuple

from utils import runtime


class Tile(NamedTuple):
    """Rows and columns that one program works on at a time, and its warps."""

    rows: int
    block: int
    warps: int


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


#: Programs that a gradient's first stage aims at: enough for every SM of a large GPU, several times over. It does not
#: depend on the GPU, so that neither does the order of the sums.
GRADIENT_PROGRAMS = runtime.pick(cpu=4, gpu=1024)
COLUMN_SUMS = runtime.pick(cpu=Tile(4, 128, 4), gpu=Tile(64, 32, 4))
SOFTMAX_LONG = runtime.pick(cpu=Tile(1, 1024, 4), gpu=Tile(1, 4096, 16))
#: Bytes of the longest row that softmax keeps on chip.
SOFTMAX_ROW_BYTES = runtime.pick(cpu=8 * 1024, gpu=64 * 1024)


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n`` and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def gelu(columns: int) -> Tile:
    """Tile of gelu for rows of ``columns`` elements."""
    most = runtime.pick(cpu=1024, gpu=2048)
    return Tile(1, min(most, max(16, power_of_two(columns))), 4)


def _tile(columns: int, elements: int, most: int, warps: int) -> Tile:
    block = min(most, max(16, power_of_two(columns)))
    return Tile(max(1, elements // block), block, warps)


def bias_relu(columns: int) -> Tile:
    """Tile of bias_relu for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(1024, 256, 4), gpu=(4096, 1024, 8)))


def bias_relu_backward(columns: int) -> Tile:
    """Tile of bias_relu's backward pass for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(1024, 256, 4), gpu=(4096, 1024, 8)))


def weighted_sum(columns: int) -> Tile:
    """Tile of weighted_sum for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(1024, 256, 4), gpu=(4096, 1024, 4)))


def weighted_sum_backward(columns: int) -> Tile:
    """Tile of weighted_sum's backward pass for rows of ``columns`` elements."""
    return _tile(columns, *runtime.pick(cpu=(1024, 256, 4), gpu=(4096, 1024, 8)))


def strips(num_rows: int, columns: int, tile: Tile) -> tuple[int, int]:
    """How a gradient's first stage cuts the rows: number of strips, and tiles below one another in each."""
    tiles = -(-num_rows // tile.rows)
    blocks = -(-columns // tile.block)
    tiles_per_strip = -(-tiles // max(1, GRADIENT_PROGRAMS // blocks))
    return -(-tiles // tiles_per_strip), tiles_per_strip


def softmax_fits(columns: int, element_size: int) -> bool:
    """Whether softmax keeps a row of ``columns`` elements on chip."""
    return columns * element_size <= SOFTMAX_ROW_BYTES


def softmax_short(columns: int, element_size: int) -> Tile:
    """Tile of softmax for rows that fit."""
    block = max(16, power_of_two(columns))
    rows = max(1, runtime.pick(cpu=1024, gpu=2048) // block)
    warps = min(32, max(1, block // 512))
    return Tile(rows, block, warps)


def tiled_matmul(element_size: int) -> MatmulTile:
    """Tile of the product through pointers."""
    if runtime.INTERPRET:
        return MatmulTile(32, 32, 32, 2, 4, 1)
    return MatmulTile(128, 128, 64, 8, 8, 3) if element_size == 2 else MatmulTile(64, 64, 32, 8, 4, 3)


def descriptor_matmul(element_size: int) -> MatmulTile:
    """Tile of the product through descriptors."""
    if runtime.INTERPRET:
        return MatmulTile(32, 32, 32, 2, 4, 1)
    return MatmulTile(128, 256, 64, 8, 8, 3) if element_size == 2 else MatmulTile(64, 64, 32, 8, 4, 3)
