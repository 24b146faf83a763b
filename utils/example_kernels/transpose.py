"""Two transposes with equal bytes and unequal sectors: row by row, and tile by tile through shared memory."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.example_kernels.elementwise import COPYABLE
from utils.example_kernels.traffic import Traffic, cdiv, size, tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

NAIVE_BLOCK = 256
TILE = 32


@triton.jit
def naive_transpose_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=mask)  # (BLOCK,), neighbours in memory
    tl.store(out_ptr + offsets * rows + row, x, mask=mask)  # each lane `rows` elements from the next


@triton.jit
def tiled_transpose_kernel(x_ptr, out_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside)  # (TILE, TILE), rows contiguous
    out_ptrs = out_ptr + column[:, None] * rows + row[None, :]
    tl.store(out_ptrs, tl.trans(x), mask=tl.trans(inside))  # (TILE, TILE), rows of the transpose contiguous


def _checked(x: torch.Tensor) -> torch.Tensor:
    tensor("x", x, 2, COPYABLE)
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")
    return torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)


def naive_transpose(x: torch.Tensor, block: int = NAIVE_BLOCK) -> torch.Tensor:
    """Transpose a contiguous ``x`` (rows, columns), a row at a time: reads are coalesced, writes are not.

    Raises:
        TypeError, ValueError: ``x`` is not a contiguous matrix on this machine's device.
    """
    out = _checked(x)
    rows, columns = x.shape
    if x.numel():
        naive_transpose_kernel[(rows, cdiv(columns, block))](x, out, rows, columns, BLOCK=block)
    return out


def tiled_transpose(x: torch.Tensor, tile: int = TILE) -> torch.Tensor:
    """Transpose a contiguous ``x`` (rows, columns), a square tile at a time: reads and writes are both coalesced.

    Raises:
        TypeError, ValueError: ``x`` is not a contiguous matrix on this machine's device.
    """
    out = _checked(x)
    rows, columns = x.shape
    if x.numel():
        tiled_transpose_kernel[(cdiv(rows, tile), cdiv(columns, tile))](x, out, rows, columns, TILE=tile)
    return out


def transpose_traffic(rows: int, columns: int, element_size: int) -> Traffic:
    """Traffic of both transposes: each element once in, once out. What differs between them is the sectors."""
    nbytes = size("rows", rows) * size("columns", columns) * size("element_size", element_size, 1)
    return Traffic(nbytes, nbytes)
