"""Every number that tunes a kernel of this lab, in one place, with the measurement that chose it.

On one H100 (Triton 3.6, PyTorch 2.11), bf16, 16 query heads on 8 key heads, head_dim 128, blocks of 16 tokens in random
order. Decode, in microseconds, for tiles of n tokens, warps, stages: 64 sequences of 8192 tokens unsplit, one sequence
of 65,536 tokens in 32 to 64 parts, the best of them, and unsplit, and 64 sequences of 100 to 1279 tokens unsplit.

============  ==========  =============  =============  ============
tile          64 x 8192   1 x 65536      unsplit        64, ragged
============  ==========  =============  =============  ============
64, 4, 3      722         111            1780           85
64, 4, 2      723         111            1866           85
64, 2, 3      722         112            2143           87
32, 4, 5      724         110            1682           86
128, 4, 2     787         110            1377           86
128, 4, 3     721         111            1298           89
128, 4, 5     721         115            969            87
64, 4, 5      801         112            1433           87
64, 4, 1      737         111            2856           95
============  ==========  =============  =============  ============

A copy of as many bytes as 64 x 8192 tokens take, 2.1 GB, takes 715. Almost any tile gets there, since many programs
with shallow pipelines have as many bytes under way as few with deep ones. (3 and 4 stages make the same program:
entries of the block table are loaded one step ahead of the keys and values that they point to, which takes stages too.)
One program alone waits for each tile in turn, so that unsplit the tile does matter; even the best is 8.8 times slower
than the split. The order of heads and tokens in a block makes no difference. Parts: one sequence of 65,536 tokens with
64, 4, 3 takes 149 in 16 parts, 113 in 32, 111 in 48, 112 in 64, 121 in 96; 64 sequences of 8192 gain nothing from being
split, nor do they lose more than 1 %. In a decode step of 256 sequences of 356 to 1280 tokens 128, 4, 2 is 1 % ahead of
64, 4, 3 (2.79 TB/s and 2.75), which is less than it loses elsewhere.

Extend: 8 chunks of 512 tokens, and one of 4096, for tiles of m rows x n tokens: 64x64, 4, 2: 62, 288. Best of one are
64x32, 4, 5 with 60 and 128x128, 8, 3 with 265.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils import runtime


class Tile(NamedTuple):
    """Rows of queries and tokens of a tile of scores, warps of a program, and stages of software pipelining."""

    m: int
    n: int
    warps: int
    stages: int


#: Programs that a multiprocessor needs, to have enough loads under way.
PROGRAMS_PER_SM = 3
#: Tokens of a part, at least, and parts of a context, at most.
SHORTEST_PART = runtime.pick(cpu=16, gpu=128)
MOST_PARTS = 128


def block_d(head_dim: int) -> int:
    """Columns of a tile of q, k or v: a power of two, at least 16."""
    return max(16, power_of_two(head_dim))


def power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for the interpreter."""
    return (0, 0) if runtime.INTERPRET else torch.cuda.get_device_capability(device)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 for the interpreter, whose programs run one after another anyway."""
    return 2 if runtime.INTERPRET else torch.cuda.get_device_properties(device).multi_processor_count


def decode(head_dim: int, dtype: torch.dtype, group: int, capability: tuple[int, int]) -> Tile:
    """Tile of the decode kernel: the ``group`` query heads of a key head, padded, against ``n`` tokens at a time."""
    m = max(16, power_of_two(group))
    if runtime.INTERPRET:
        return Tile(m, 16, 4, 1)
    width = block_d(head_dim)
    if dtype == torch.float32:
        return Tile(m, 32 if width <= 64 else 16, 4, 2)
    return Tile(m, 128 if width <= 64 else 64 if width == 128 else 32, 4, 3)


def extend(head_dim: int, dtype: torch.dtype, group: int, capability: tuple[int, int]) -> Tile:
    """Tile of the extend kernel: ``m`` rows are the queries of a tile times the query heads of a key head, padded."""
    least = power_of_two(group)
    if runtime.INTERPRET:
        return Tile(max(16, least), 16, 4, 1)
    width = block_d(head_dim)
    if dtype == torch.float32:
        return Tile(max(16, least), 32, 4, 2) if width <= 64 else Tile(max(32, least), 32, 8, 2)
    if capability[0] >= 9:
        return Tile(max(64, least), 64 if width <= 128 else 32, 4, 2)
    return Tile(max(64, least), 32, 4, 2) if width <= 128 else Tile(max(64, least), 64, 8, 2)


def merge(parts: int, width: int) -> Tile:
    """Tile of the merge: ``n`` parts at a time of one row."""
    if runtime.INTERPRET:
        return Tile(1, min(8, max(2, power_of_two(parts))), 4, 1)
    return Tile(1, min(32, max(2, power_of_two(parts))), 4, 1)


def splits(rows: int, longest: int, sms: int) -> int:
    """Parts of every context: three programs per multiprocessor, but each of at least ``SHORTEST_PART`` tokens.

    Args:
        rows: Sequences times key heads: programs if nothing is split.
        longest: The most tokens that a context may have.
        sms: Multiprocessors.
    """
    wanted = -(-PROGRAMS_PER_SM * sms // max(1, rows))
    return max(1, min(wanted, longest // SHORTEST_PART, MOST_PARTS))


def write(heads: int, width: int) -> Tile:
    """Tile of the cache write: ``n`` key heads of one token."""
    return Tile(1, min(power_of_two(heads), max(1, 2048 // width)), 4, 1)
