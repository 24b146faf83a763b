"""Hidden cases of exercise 2.8: the order of the tiles, as the student's ``grouped_tile`` gives it to a kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from utils import runtime
from utils.checks.hidden import Draw, Observed

import triton  # isort: skip
import triton.language as tl  # isort: skip

# The function that the kernel below asks; a kernel sees the globals of its module.
_grouped_tile: Callable | None = None


@triton.jit
def order_kernel(out_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile ``program_id(0)`` as the student's ``grouped_tile`` gives them."""
    pid = tl.program_id(0)
    row, column = _grouped_tile(pid, tiles_m, tiles_n, GROUP_M)
    tl.store(out_ptr + 2 * pid, row)
    tl.store(out_ptr + 2 * pid + 1, column)


def tile_orders(package: ModuleType, seed: int) -> Observed:
    """Row and column of each tile, in the order of the programs."""
    global _grouped_tile
    draw = Draw(seed, "2.8")
    observed = Observed()
    _grouped_tile = package.grouping.grouped_tile
    shapes = [("one tile", 1, 1, 3), ("whole groups", 6, draw.between(2, 5), 3), ("one group", 3, 4, 9)]
    shapes += [
        ("a short last group", 7, draw.between(2, 6), draw.between(2, 5)),
        ("one row in the last group", 5, 3, 4),
    ]
    for what, tiles_m, tiles_n, group in shapes:
        places = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32, device=runtime.DEVICE)
        order_kernel[(tiles_m * tiles_n,)](places, tiles_m, tiles_n, GROUP_M=group)
        observed[f"grouped_tile with {what}"] = places
    return observed
