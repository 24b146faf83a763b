"""Every number that tunes a kernel of this lab, in one place.

Tiles of products on Hopper are the fastest of 53 on an H100, 4096 and 8192 square (torch 2.11, Triton 3.6, 2026-11-28);
the others are what fits the registers and the shared memory of a multiprocessor, by the compiler's word
(``tests/test_lab6_compile.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils import runtime

#: More programs of an SM than any product has tiles.
ONE_TILE = 2**20


class MatmulTile(NamedTuple):
    """Sides of a tile, rows of tiles in a group, warps, and stages of software pipelining.

    ``halves``: whether a tile is stored in two halves. ``flatten``: whether the loops over tiles and along K are one.
    ``per_sm``: programs of an SM, each of which takes one tile after another; :data:`ONE_TILE` gives each tile its own.
    """

    m: int
    n: int
    k: int
    group: int
    warps: int
    stages: int
    halves: bool = False
    flatten: bool = True
    per_sm: int = 1


def power_of_two(n: int) -> int:
    """Smallest power of two that is at least ``n`` and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 for the interpreter, whose programs run one after another anyway."""
    return 2 if runtime.INTERPRET else torch.cuda.get_device_properties(device).multi_processor_count


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None in the interpreter."""
    return None if runtime.INTERPRET else torch.cuda.get_device_capability(device)


def scaled_matmul(described: bool, out_dtype: torch.dtype, capability: tuple[int, int] | None = None) -> MatmulTile:
    """Tile of the product whose scales stand outside of the sum: as large as shared memory and registers allow.

    Args:
        described: Whether the operands come through descriptors.
        out_dtype: Of the product; a tile of it is stored from shared memory.
        capability: Of the GPU; None in the interpreter.
    """
    if capability is None:
        return MatmulTile(32, 32, 32, 2, 4, 1)
    if not described or capability[0] not in (9, 10):  # 99 KiB of shared memory, or no TMA
        return MatmulTile(128, 128, 64, 8, 8, 3)
    if capability[0] == 10:
        return MatmulTile(128, 128 if out_dtype == torch.float32 else 256, 128, 8, 8, 3)
    return MatmulTile(128, 256, 128, 8, 8, 3 if out_dtype == torch.float32 else 4, halves=True)


def block_scaled_matmul(square: bool, capability: tuple[int, int] | None = None) -> MatmulTile:
    """Tile of the product with a scale for each 128 of K, which is the step along K.

    Args:
        square: Whether b has one scale for 128 of its rows.
        capability: Of the GPU; None in the interpreter.
    """
    if capability is None:
        return MatmulTile(32, 32, 128, 2, 4, 1)
    if capability[0] not in (9, 10):
        return MatmulTile(128, 128, 128, 8, 8, 2, flatten=False)
    if capability[0] == 10:
        return MatmulTile(128, 128, 128, 8, 8, 4, flatten=False)
    if square:
        return MatmulTile(64, 128, 128, 8, 4, 2, flatten=False, per_sm=3)
    return MatmulTile(64, 128, 128, 16, 4, 3, flatten=False, per_sm=ONE_TILE)


def row_tile(columns: int) -> tuple[int, int, int]:
    """Rows and columns of a tile of whole rows, and its warps: each thread holds 16 elements."""
    block = max(128, power_of_two(columns))
    rows = max(1, runtime.pick(cpu=1024, gpu=4096) // block)
    return rows, block, min(32, max(1, rows * block // 512))


def column_tile(columns: int) -> tuple[int, int, int]:
    """Rows and columns of a tile of blocks, and its warps: as :func:`row_tile`, of parts of rows."""
    block = min(runtime.pick(cpu=256, gpu=1024), max(128, power_of_two(columns)))
    rows = runtime.pick(cpu=1024, gpu=4096) // block
    return rows, block, rows * block // 512


def grouped_matmul(element_size: int, capability: tuple[int, int] | None = None) -> MatmulTile:
    """Tile of an expert layer's product, of which an expert's last may be mostly empty.

    Args:
        element_size: Bytes of an element; float32 is multiplied without tensor cores.
        capability: Of the GPU; None in the interpreter.
    """
    if capability is None:
        return MatmulTile(16, 32, 32, 2, 4, 1)
    if element_size == 4:
        return MatmulTile(64, 64, 16, 8, 4, 2)
    return MatmulTile(128, 256, 64, 8, 8, 3) if capability[0] in (9, 10) else MatmulTile(128, 128, 32, 8, 4, 3)


def grouped_weight_gradient(element_size: int, capability: tuple[int, int] | None = None) -> MatmulTile:
    """Tile of an expert's gradient: ``m`` rows a step, ``k`` and ``n`` its sides, as :func:`grouped_matmul`."""
    if capability is None:
        return MatmulTile(16, 32, 32, 1, 4, 1)
    if element_size == 4:
        return MatmulTile(16, 64, 32, 1, 4, 2)
    return MatmulTile(64, 128, 128, 1, 8, 3) if capability[0] in (9, 10) else MatmulTile(32, 128, 128, 1, 8, 3)
