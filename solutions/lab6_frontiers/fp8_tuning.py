"""Every number that tunes the kernels over an fp8 cache.

They follow from registers, shared memory and the bytes that are under way. Other tiles have not been measured; with
these, decoding reaches 0.77 of a copy on an H200 (record ``frontier_kernels``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils import runtime

from .tuning import power_of_two


class DecodeTile(NamedTuple):
    """Tokens of a tile, warps of a program, stages of its software pipeline, and programs that an SM should get."""

    n: int
    warps: int
    stages: int
    programs_per_sm: int


class ExtendTile(NamedTuple):
    """Rows of queries and tokens of a tile of scores, warps of a program, and stages of software pipelining."""

    m: int
    n: int
    warps: int
    stages: int


#: Of the decode kernel on a GPU.
DECODE = DecodeTile(64, 4, 5, 4)
#: Tokens of a part, at least, and parts of a context, at most.
SHORTEST_PART = runtime.pick(cpu=16, gpu=256)
MOST_PARTS = 128


def block_d(head_dim: int) -> int:
    """Columns of a tile of q, k or v: a power of two, at least 16."""
    return max(16, power_of_two(head_dim))


def converts_e4m3(device: torch.device) -> bool:
    """Whether kernels there have e4m3 as a type: from Ada (8.9) on, and in the interpreter."""
    return runtime.INTERPRET or torch.cuda.get_device_capability(device) >= (8, 9)


def decode(head_dim: int, block_size: int) -> DecodeTile:
    """Tile of the decode kernel, of whole blocks."""
    if runtime.INTERPRET:
        return DecodeTile(max(16, block_size), 4, 1, 3)
    n, warps, stages, programs = DECODE
    width = block_d(head_dim)
    if width <= 64:
        n = 2 * n
    elif width > 128:
        n, stages = n // 2, 3
    return DecodeTile(max(n, block_size), warps, stages, programs)


def extend(head_dim: int, padded: int, block_size: int) -> ExtendTile:
    """Tile of the extend kernel: rows are queries times the query heads of a key head, ``padded`` to a power of two."""
    if runtime.INTERPRET:
        return ExtendTile(max(16, padded), max(16, block_size), 4, 1)
    width = block_d(head_dim)
    m, n, warps = (32, 32, 4) if width > 128 else (64, 64, 8 if width == 128 else 4)
    return ExtendTile(max(m, padded), max(n, block_size), warps, 2)


def splits(rows: int, longest: int, programs: int) -> int:
    """Parts of every context.

    Args:
        rows: sequences times key heads: programs if nothing is split.
        longest: the most tokens that a context may have.
        programs: that fill the GPU.
    """
    wanted = -(-programs // max(1, rows))
    return max(1, min(wanted, longest // SHORTEST_PART, MOST_PARTS))
