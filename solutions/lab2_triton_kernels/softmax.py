"""Softmax over the last axis: short rows in one pass (exercise 2.5), long rows online in two reads (exercise 2.6)."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .arguments import check_tensor, refuse_gradient
from .multi_cta_softmax import multi_cta_fits, multi_cta_softmax
from .rows import Rows, as_rows, col_offset, row_offset

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def softmax_short_kernel(
    x_ptr, out_ptr, num_rows, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_col,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` rows of at most ``BLOCK`` columns, kept on chip from the load to the store."""
    ### BEGIN SOLUTION 2.5: softmax of short rows
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < num_rows) & (column[None, :] < columns)
    x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
    x_ptrs = x_row[:, None] + col_offset(column, stride_col, INT64)[None, :]
    x = tl.load(
        x_ptrs, mask=inside, other=-float("inf"), eviction_policy="evict_last"
    )  # (ROWS, BLOCK), -inf past the end
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = numerator / tl.sum(numerator, axis=1)[:, None]
    out_ptrs = out_ptr + row[:, None] * columns + column[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    ### END SOLUTION


@triton.jit
def softmax_long_kernel(
    x_ptr, out_ptr, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_col,
    BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program: one row, ``BLOCK`` columns at a time, first for its maximum and sum, then for its values."""
    ### BEGIN SOLUTION 2.6: softmax of long rows
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
    lanes = tl.arange(0, BLOCK)
    # Each lane keeps the maximum of what it has seen and the sum of exponentials relative to it. When x is the new
    # maximum the old sum shrinks by exp(maximum - x) and x itself counts 1, otherwise x adds exp(x - maximum): one
    # exponential either way. A finite start keeps -inf - (-inf) = NaN out.
    maximum = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        x = tl.load(x_row + col_offset(column, stride_col, INT64), mask=column < columns, other=-float("inf")).to(
            tl.float32
        )
        ratio = tl.exp(-tl.abs(x - maximum))
        total = tl.where(x > maximum, total * ratio + 1, total + ratio)
        maximum = tl.maximum(maximum, x)
    row_maximum = tl.max(maximum, axis=0)
    scale = 1 / tl.sum(total * tl.exp(maximum - row_maximum), axis=0)
    # Backwards: the columns read last are those that the L2 cache still holds.
    last = (columns - 1) // BLOCK * BLOCK
    for done in range(0, columns, BLOCK):
        column = last - done + lanes
        mask = column < columns
        x = tl.load(x_row + col_offset(column, stride_col, INT64), mask=mask).to(tl.float32)  # (BLOCK,), again
        y = tl.exp(x - row_maximum) * scale
        tl.store(out_ptr + row * columns + column, y.to(out_ptr.dtype.element_ty), mask=mask)
    ### END SOLUTION


def _short(x: torch.Tensor, out: torch.Tensor, rows: Rows) -> torch.Tensor:
    tile = tuning.softmax_short(rows.columns)
    ### BEGIN SOLUTION 2.5: softmax of short rows, the launch
    softmax_short_kernel[(triton.cdiv(rows.count, tile.rows),)](
        x, out, rows.count, rows.columns, *rows.layout_args,
        ROWS=tile.rows, BLOCK=tile.block, INT64=rows.needs_int64, num_warps=tile.warps,
    )  # fmt: skip
    return out
    ### END SOLUTION


def _long(x: torch.Tensor, out: torch.Tensor, rows: Rows) -> torch.Tensor:
    tile = tuning.online_softmax(rows.columns)
    ### BEGIN SOLUTION 2.6: softmax of long rows, the launch
    softmax_long_kernel[(rows.count,)](
        x, out, rows.columns, *rows.layout_args, BLOCK=tile.block, INT64=rows.needs_int64, num_warps=tile.warps
    )
    return out
    ### END SOLUTION


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last axis.

    A row that fits a program's registers (``tuning.softmax_fits``) is read once. On a GPU, several programs share a
    longer row (:mod:`.multi_cta_softmax`); the interpreter, and rows of millions, use :func:`online_softmax`.

    Args:
        x: (..., columns) of any strides; float32, float16 or bfloat16, computed in float32.

    Returns:
        A contiguous tensor of x's shape and dtype. A row of -inf gives NaN, as in PyTorch. It is forward only.

    Raises:
        TypeError, ValueError: x is no such tensor on ``utils.runtime.DEVICE``.
        RuntimeError: autograd is recording and x asks for its gradient.
    """
    x, out, rows = _prepared("softmax", x)
    if x.numel() == 0:
        return out
    if tuning.softmax_fits(rows.columns, x.element_size()):
        return _short(x, out, rows)
    return (multi_cta_softmax if multi_cta_fits(x, rows.columns) else _long)(x, out, rows)


def online_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last axis with one program per row and two reads, however long the rows.

    The first read finds maximum and sum together, online (Milakov and Gimelshein 2018, algorithm 3). Arguments,
    result and errors as of :func:`softmax`.
    """
    x, out, rows = _prepared("online_softmax", x)
    return _long(x, out, rows) if x.numel() else out


def _prepared(function: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    """``x`` checked and seen as rows, and an output for it."""
    check_tensor("x", x, least_dims=1)
    refuse_gradient(function, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, rows = as_rows(x)
    return x, out, rows
