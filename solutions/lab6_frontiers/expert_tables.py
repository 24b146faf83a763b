"""Which rows belong to which expert: tables from which persistent programs take their tiles.

They are made on the GPU from the counts of rows. The host does not wait for the counts, so it makes room for as many
tiles as any counts with the same sum could give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def rows_before(counts, expert, EXPERTS: tl.constexpr):
    """The sum of the counts (EXPERTS,) of the experts before this one."""
    return tl.sum(tl.where(tl.arange(0, EXPERTS) < expert, counts, 0), axis=0)


@triton.jit(do_not_specialize=["experts", "length"])
def tile_table_kernel(
    counts_ptr, table_ptr, tiles_ptr, experts, length, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """One program: the tiles of one expert, ``ENTRIES`` at a time. The first program also counts the tiles of all."""
    expert = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + each, mask=each < experts, other=0).to(tl.int32)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    rows = tl.load(counts_ptr + expert).to(tl.int32)
    begin = rows_before(counts, expert, EXPERTS)
    first = rows_before(tiles, expert, EXPERTS)
    for start in range(0, rows, ENTRIES * BLOCK_M):
        row = start + tl.arange(0, ENTRIES) * BLOCK_M
        entry = first + row // BLOCK_M
        inside = (row < rows) & (entry < length)  # wrong counts must not write beyond the table
        tl.store(table_ptr + entry, tl.zeros_like(row) + expert, mask=inside)
        tl.store(table_ptr + length + entry, begin + row, mask=inside)
        tl.store(table_ptr + 2 * length + entry, tl.minimum(rows - row, BLOCK_M), mask=inside)
    if expert == 0:
        tl.store(tiles_ptr, tl.minimum(tl.sum(tiles, axis=0), length))


@triton.jit(do_not_specialize=["experts"])
def largest_first_kernel(counts_ptr, table_ptr, experts, EXPERTS: tl.constexpr):
    """One program: one expert, whose entry is the number of experts that come before it."""
    expert = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + each, mask=each < experts, other=0).to(tl.int32)
    rows = tl.load(counts_ptr + expert).to(tl.int32)
    larger = (counts > rows) | ((counts == rows) & (each < expert))
    entry = tl.sum(larger.to(tl.int32), axis=0)
    tl.store(table_ptr + entry, expert)
    tl.store(table_ptr + experts + entry, rows_before(counts, expert, EXPERTS))
    tl.store(table_ptr + 2 * experts + entry, rows)


def tile_table(counts: Tensor, rows: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Expert, first row and number of rows of each tile, (3, longest) int32; how many tiles there are, (1,) int32.

    What follows the last tile in the table is not written.

    Args:
        counts: (E,) rows of each expert, int32 or int64.
        rows: Rows of all experts together.
        block_m: Rows of a tile; the last tile of an expert may have fewer.
    """
    experts = len(counts)
    longest = rows // block_m + min(experts, rows)  # an expert's last tile may have a single row
    table = torch.empty((3, longest), dtype=torch.int32, device=counts.device)
    tiles = torch.empty(1, dtype=torch.int32, device=counts.device)
    tile_table_kernel[(experts,)](
        counts.contiguous(), table, tiles, experts, longest, EXPERTS=tuning.power_of_two(experts), BLOCK_M=block_m,
        ENTRIES=128, num_warps=1,
    )  # fmt: skip
    return table, tiles


def largest_first(counts: Tensor) -> Tensor:
    """Number, first row and number of rows of each expert, (3, E) int32; the expert with most rows comes first."""
    experts = len(counts)
    table = torch.empty((3, experts), dtype=torch.int32, device=counts.device)
    largest_first_kernel[(experts,)](
        counts.contiguous(), table, experts, EXPERTS=tuning.power_of_two(experts), num_warps=1
    )
    return table
