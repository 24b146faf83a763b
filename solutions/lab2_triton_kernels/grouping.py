"""Which tile of a matrix product a program computes (exercise 2.8): the order decides what the L2 cache holds."""

from __future__ import annotations

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def row_major_tile(pid, tiles_n):
    """Row and column of tile ``pid`` when tiles are counted row by row."""
    return pid // tiles_n, pid % tiles_n


@triton.jit
def grouped_tile(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile ``pid`` when ``GROUP_M`` rows of tiles form a group, counted column by column.

    Programs that run at the same time then share few rows of a and few columns of b: a wave of 128 programs reads
    128 + 1 bands in row order, but only 8 + 16 in groups of 8. The last group may have fewer rows.
    """
    ### BEGIN SOLUTION 2.8: grouped order
    tiles_per_group = GROUP_M * tiles_n
    first_tile_m = pid // tiles_per_group * GROUP_M
    group_rows = min(tiles_m - first_tile_m, GROUP_M)
    pid_in_group = pid % tiles_per_group
    return first_tile_m + pid_in_group % group_rows, pid_in_group // group_rows
    ### END SOLUTION


@triton.jit
def swizzle_tile(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the tile that program ``pid`` computes."""
    if GROUP_M == 1:
        tile_m, tile_n = row_major_tile(pid, tiles_n)
    else:
        tile_m, tile_n = grouped_tile(pid, tiles_m, tiles_n, GROUP_M)
    return tile_m, tile_n
