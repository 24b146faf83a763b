"""What the kernels share: which tile a program owns, how a tile is loaded and stored, which keys a query sees."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOG2_E = 1.4426950408889634


@triton.jit
def tile_of(program, tiles, sequences, together):
    """Tile and sequence (a head of a batch entry) of a program; ``tiles`` tiles for each of ``sequences``.

    The programs of ``together`` sequences follow one another tile by tile, so that they run at the same time and find
    each other's keys and values in the L2 cache.
    """
    first = program // (together * tiles) * together
    size = tl.minimum(together, sequences - first)
    rest = program - first * tiles
    return rest // size, first + rest % size


@triton.jit
def sequence_start(ptr, sequence, heads, stride_b, stride_h, GROUP: tl.constexpr):
    """Where the rows of a sequence of queries lie, or (GROUP > 1) those of the keys that it shares with others."""
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads // GROUP).to(tl.int64)
    return ptr + batch * stride_b + head * stride_h


@triton.jit
def load_rows(
    start_ptr, first, N, stride_n, stride_d,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` to ``first + ROWS - 1`` of a sequence of N: (ROWS, BLOCK_D), zeros beyond its edges.

    WHOLE: no row is beyond N. WIDE: an offset passes 2^31.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    left = N - first
    if WIDE:
        first = tl.cast(first, tl.int64)
        row = row.to(tl.int64)
        column = column.to(tl.int64)
    place = start_ptr + first * stride_n + (row[:, None] * stride_n + column[None, :] * stride_d)
    if WHOLE and HEAD_DIM == BLOCK_D:
        return tl.load(place)
    elif WHOLE:
        return tl.load(place, mask=column[None, :] < HEAD_DIM, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        return tl.load(place, mask=row[:, None] < left, other=0.0)
    else:
        return tl.load(place, mask=(row[:, None] < left) & (column[None, :] < HEAD_DIM), other=0.0)


@triton.jit
def store_rows(
    start_ptr, value, first, N, stride_n, stride_d,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store (ROWS, BLOCK_D) as rows ``first`` to ``first + ROWS - 1`` of a sequence of N, in the tensor's dtype."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    left = N - first
    if WIDE:
        first = tl.cast(first, tl.int64)
        row = row.to(tl.int64)
        column = column.to(tl.int64)
    place = start_ptr + first * stride_n + (row[:, None] * stride_n + column[None, :] * stride_d)
    inside = (row[:, None] < left) & (column[None, :] < HEAD_DIM)
    tl.store(place, value.to(start_ptr.dtype.element_ty), mask=inside)


def is_wide(*tensors: torch.Tensor, rows: int = 256) -> bool:
    """Whether an offset inside one head of a (B, H, N, D) tensor, a tile's padding included, passes 2^31."""
    return any((x.shape[2] + rows) * abs(x.stride(2)) + 512 * abs(x.stride(3)) >= 2**31 for x in tensors)


def empty_in_order(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor of x's shape and dtype, its axes in memory in x's order, without gaps."""
    return torch.empty_like(x, memory_format=torch.preserve_format)
