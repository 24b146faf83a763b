"""Every number that tunes the product with 4-bit weights.

The tiles were chosen from what each moves and issues: with a tile of n rows, the activations that a program reads are
4 M / n of the weights' bytes, all from the L2 cache, so that n grows with the batch M. An H100 has decided only where
the wide kernel serves small batches too (torch 2.11, Triton 3.6, 2026-11-28): of 28672 x 4096 it takes 30 us and the
other 48, of 6144 x 4096 15 and 13, of 4096 x 14336 24 and 19.
"""

from __future__ import annotations

from typing import NamedTuple

from utils import runtime

from .tuning import power_of_two


class Int4Tile(NamedTuple):
    """What one program takes.

    Attributes:
        m: rows of activations, a power of two of at least 8.
        n: rows of the weight, a power of two of at least 16.
        groups: groups of 128 columns in one step; the warps share them out, so that their sums meet in one program.
            With 1 the warps share out the rows of the weight (:mod:`.int4_wide`).
        splits: programs that share the columns; their sums meet in a second kernel.
        warps, stages: of a program, and of its software pipeline.
        early: start while the kernel before is at its end (programmatic dependent launch, from Hopper on).
    """

    m: int
    n: int
    groups: int
    splits: int
    warps: int
    stages: int
    early: bool = False


#: Rows of activations up to which a tile is used -> m, n, groups, warps, stages.
TILES = {
    4: (8, 16, 8, 8, 4),
    8: (8, 32, 8, 8, 4),
    16: (16, 64, 1, 4, 5),
    32: (32, 64, 1, 4, 5),
    64: (64, 128, 1, 8, 4),
}
LARGEST = max(TILES)
#: From so many rows of the weight on for each multiprocessor, few activations go the wide kernel's way as well.
MANY_OUTPUTS, WIDE = 192, 16
#: Programs that a multiprocessor gets from a product that is split, at most: one where warps share out the columns, as
#: a second kernel costs more than a second program brings; and steps of a part, at least.
PROGRAMS_PER_SM, WIDE_PROGRAMS_PER_SM, FEWEST_STEPS = 1, 2, 4


def int4(rows: int, outputs: int, groups: int, sms: int) -> Int4Tile:
    """Tile of a product of ``rows`` activations with ``outputs`` rows of weights in so many ``groups`` of columns."""
    size = next((size for size in TILES if rows <= size), LARGEST)
    if outputs >= MANY_OUTPUTS * sms:
        size = max(size, WIDE)
    m, n, each, warps, stages = TILES[size]
    if runtime.INTERPRET:
        n, warps, stages = 16, 4, 1
    each = min(each, power_of_two(groups))
    if each > 1:
        warps = min(warps, each)
    programs = -(-outputs // n) * -(-rows // m)
    per_sm = WIDE_PROGRAMS_PER_SM if each == 1 else PROGRAMS_PER_SM
    splits = max(1, min(per_sm * sms // programs, groups // (FEWEST_STEPS * each)))
    return Int4Tile(m, n, each, splits, warps, stages)
