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
    raise NotImplementedError("Lab 2, exercise 2.5: softmax of short rows")


@triton.jit
def softmax_long_kernel(
    x_ptr, out_ptr, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_col,
    BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program: one row, ``BLOCK`` columns at a time, first for its maximum and sum, then for its values."""
    raise NotImplementedError("Lab 2, exercise 2.6: softmax of long rows")


def _short(x: torch.Tensor, out: torch.Tensor, rows: Rows) -> torch.Tensor:
    tile = tuning.softmax_short(rows.columns)
    raise NotImplementedError("Lab 2, exercise 2.5: softmax of short rows, the launch")


def _long(x: torch.Tensor, out: torch.Tensor, rows: Rows) -> torch.Tensor:
    tile = tuning.online_softmax(rows.columns)
    raise NotImplementedError("Lab 2, exercise 2.6: softmax of long rows, the launch")


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
