"""Which tile of a matrix product a program computes: the order decides what the L2 cache holds."""

from __future__ import annotations

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def grouped_tile(number, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile when ``GROUP_M`` rows of tiles form a group, counted column by column.

    Programs that run at the same time then share few rows of a and few rows of b. The last group may have fewer rows.
    """
    tiles_per_group = GROUP_M * tiles_n
    first_tile_m = number // tiles_per_group * GROUP_M
    group_rows = min(tiles_m - first_tile_m, GROUP_M)
    in_group = number % tiles_per_group
    return first_tile_m + in_group % group_rows, in_group // group_rows
