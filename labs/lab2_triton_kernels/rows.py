"""Any tensor as rows: how a kernel finds its row in memory, whatever the leading shape and the strides.

A kernel here sees a tensor (..., columns) as ``count`` rows. Leading axes that lie evenly in memory are merged into
one; what remains are at most three, and the start of row r is::

    stride_0 * outer + stride_1 * middle + stride_2 * inner      with r = (outer * size_1 + middle) * size_2 + inner

Of a contiguous tensor one axis remains: ``size_1`` and ``size_2`` are 1, Triton compiles the kernel for that value,
and the divisions vanish.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

import triton  # isort: skip
import triton.language as tl  # isort: skip

_MOST_LEADING = 3
_INT32 = 2**31


@dataclass(frozen=True)
class Rows:
    """Where the rows of a tensor lie, in elements.

    Attributes:
        count: Number of rows.
        columns: Elements of a row.
        sizes: ``size_1`` and ``size_2`` of the formula above.
        strides: ``stride_0``, ``stride_1`` and ``stride_2``.
        stride_col: Stride along a row.
    """

    count: int
    columns: int
    sizes: tuple[int, int]
    strides: tuple[int, int, int]
    stride_col: int

    @property
    def layout_args(self) -> tuple[int, int, int, int, int, int]:
        """The six arguments by which a kernel finds an element: both sizes, the three strides, ``stride_col``."""
        return *self.sizes, *self.strides, self.stride_col

    @property
    def needs_int64(self) -> bool:
        """Whether offsets along a row pass 2^31, so that 32-bit integers do not hold them."""
        return self.columns * self.stride_col >= _INT32


def as_rows(x: torch.Tensor) -> tuple[torch.Tensor, Rows]:
    """View ``x`` (..., columns) as rows along its last axis.

    Returns ``x`` and its :class:`Rows`. Only where more than three leading axes remain after merging, which takes a
    view such as ``x.permute(3, 1, 0, 2, 4)``, is ``x`` copied first.
    """
    axes = _merged(list(zip(x.shape[:-1], x.stride()[:-1])))
    if len(axes) > _MOST_LEADING:
        x = x.contiguous()
        axes = _merged(list(zip(x.shape[:-1], x.stride()[:-1])))
    return x, _rows(axes, x.shape[-1], x.stride(-1))


def as_elements(x: torch.Tensor) -> tuple[torch.Tensor, Rows, torch.Tensor]:
    """View ``x`` in the order of its memory, for a function of each element: the longer the rows the better.

    Returns ``x``, its :class:`Rows` and an empty output of its shape, whose elements lie in the order of these rows
    without gaps. A tensor without gaps, transposed or not, is one row.
    """
    order = sorted(range(x.ndim), key=lambda axis: -x.stride(axis))
    permuted = x.permute(order)
    axes = _merged(list(zip(permuted.shape, permuted.stride())))
    if len(axes) > _MOST_LEADING + 1:
        permuted = permuted.contiguous()
        axes = _merged(list(zip(permuted.shape, permuted.stride())))
    out = torch.empty(permuted.shape, dtype=x.dtype, device=x.device).permute(
        [order.index(axis) for axis in range(x.ndim)]
    )
    *leading, (columns, stride_col) = axes or [(1, 1)]
    return permuted, _rows(leading, columns, stride_col), out


def _merged(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Axes (size, stride) with neighbours merged where one stride describes both, and without axes of size 1."""
    found: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


def _rows(leading: list[tuple[int, int]], columns: int, stride_col: int) -> Rows:
    count = 1
    for size, _ in leading:
        count *= size
    padded = [*leading, *[(1, 0)] * (_MOST_LEADING - len(leading))]
    (_, stride_0), (size_1, stride_1), (size_2, stride_2) = padded
    return Rows(count, columns, (size_1, size_2), (stride_0, stride_1, stride_2), stride_col if columns > 1 else 1)


@triton.jit
def row_offset(row, size_1, size_2, stride_0, stride_1, stride_2):
    """Elements (int64) from the start of a tensor to the start of ``row``; a number, or a block of row numbers."""
    row = row.to(tl.int64)
    inner = row % size_2
    middle = row // size_2 % size_1
    outer = row // size_2 // size_1
    return outer * stride_0 + middle * stride_1 + inner * stride_2


@triton.jit
def col_offset(columns, stride_col, INT64: tl.constexpr):
    """Elements from the start of a row to ``columns``: in 32-bit integers, or in 64-bit ones where they are needed."""
    if INT64:
        columns = columns.to(tl.int64)
    return columns * stride_col


@triton.jit
def element_offsets(row, column, layout):
    """(ROWS, BLOCK) offsets of a tile's elements, in 64 bits; ``layout`` is the tuple ``rows.layout_args``, whole."""
    start = row_offset(row, layout[0], layout[1], layout[2], layout[3], layout[4])
    return start[:, None] + col_offset(column, layout[5], True)[None, :]
