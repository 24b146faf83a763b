"""Every number that tunes the product with 4-bit weights.

For many activations, tiles were chosen from what each moves and issues: with a tile of n rows, the activations that a
program reads are 4 M / n of the weights' bytes, all from the L2 cache, so that n grows with the batch M.

Beyond 64 an H200 decided on splits (torch 2.11, Triton 3.6, 2026-11-30; the four products of a layer of Qwen3-0.6B,
batch 256): 42 us a layer with one program for each multiprocessor, 50 with two; 44 with expanded weights and cuBLAS, 30
in bf16. At batch 512 it is 64, and 51 with expanded weights.

For up to 8, it decided (the same day, batch 1, one product after the other in a CUDA graph).
Where a multiprocessor gets few programs, the next kernel had better start late (4096 x 4096: 5.4 us, 7.4 at once, 6.2
after): programs that start early take turns with this kernel's own. Where it gets many, it starts at once (14336 x
4096: 11.6 us, 14.0 late, 14.7 after).
"""

from __future__ import annotations

from typing import NamedTuple

from utils import runtime

from .int4_rows import AT_ONCE, LATE, ROWS


class FewTile(NamedTuple):
    """How up to 8 activations are multiplied.

    Attributes:
        groups: of 128 columns in one step, shared out among the warps.
        warps: of a program, which takes 16 rows of the weight.
        stages: places for steps in shared memory.
        next: when the next kernel may start.
    """

    groups: int
    warps: int
    stages: int
    next: int


class Int4Tile(NamedTuple):
    """What one program takes of a product with more.

    Attributes:
        m: rows of activations, a power of two of at least 16.
        n: rows of the weight, a power of two of at least 16, shared out among the warps.
        splits: programs that share the columns; their sums meet in a second kernel.
        warps, stages: of a program, and of its software pipeline.
    """

    m: int
    n: int
    splits: int
    warps: int
    stages: int


#: Programs of a multiprocessor up to which a tile is used -> the tile.
FEW = {3: FewTile(8, 4, 3, LATE), 10: FewTile(4, 4, 5, AT_ONCE), 1 << 30: FewTile(4, 2, 4, AT_ONCE)}
#: Rows of activations up to which a tile is used -> m, n, warps, stages.
TILES = {16: (16, 64, 4, 5), 32: (32, 64, 4, 5), 64: (64, 128, 8, 4)}
LARGEST = max(TILES)
#: Rows of activations beyond which the weights had better be expanded to 16 bits for an ordinary product.
EXPANDED = runtime.pick(cpu=64, gpu=256)
#: Programs that a multiprocessor gets from a product that is split, at most, up to 64 rows and beyond; and groups of a
#: part, at least.
PROGRAMS_PER_SM, FEWEST_GROUPS = (2, 1), 4


def few(outputs: int, sms: int) -> FewTile:
    """Tile of a product of up to 8 activations with so many rows of weights."""
    each = outputs / (ROWS * sms)
    return next(tile for most, tile in FEW.items() if each <= most)


def int4(rows: int, outputs: int, groups: int, sms: int) -> Int4Tile:
    """Tile of a product of ``rows`` activations with ``outputs`` rows of weights in so many ``groups`` of columns."""
    m, n, warps, stages = TILES[next((size for size in TILES if rows <= size), LARGEST)]
    if runtime.INTERPRET:
        n, warps, stages = 16, 4, 1
    programs = -(-outputs // n) * -(-rows // m)
    at_once = PROGRAMS_PER_SM[rows > LARGEST] * sms
    return Int4Tile(m, n, max(1, min(at_once // programs, groups // FEWEST_GROUPS)), warps, stages)
