"""The weighted sum of each row, and its backward pass (exercises 2.3 and 2.4)."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .arguments import check_tensor, check_vector
from .column_sums import column_sums
from .rows import as_rows, col_offset, row_offset

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def weighted_sum_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, columns: tl.constexpr, size_1, size_2, stride_0, stride_1, stride_2,
    stride_col, stride_weight, ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` whole rows, ``BLOCK`` columns at a time.

    ``columns`` is known to the compiler, which then knows how often the loop turns, as ``torch.compile`` does.
    """
    raise NotImplementedError("Lab 2, exercise 2.3: weighted sum")


@triton.jit
def weighted_sum_dx_kernel(
    dout_ptr, weight_ptr, dx_ptr, num_rows, columns, stride_weight,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ``ROWS`` rows and ``BLOCK`` columns of dx. It reads no x: this kernel only writes."""
    raise NotImplementedError("Lab 2, exercise 2.4: gradient of x")


@triton.jit
def weighted_sum_dweight_kernel(
    dout_ptr, x_ptr, partial_ptr, num_rows, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_col,
    tiles_per_split,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``tiles_per_split`` tiles of ``ROWS`` rows below one another, summed over their rows.

    Each lane adds up its own rows. The lanes of a column meet at the end, the splits in :func:`column_sums`.
    """
    raise NotImplementedError("Lab 2, exercise 2.4: gradient of the weight, first stage")


class WeightedSum(torch.autograd.Function):
    """``(weight * x).sum(-1)``; the product is never written to memory, forward or backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
        if x.numel() == 0:
            return out.zero_()
        x, rows = as_rows(x)
        tile = tuning.weighted_sum(rows.columns)
        raise NotImplementedError("Lab 2, exercise 2.3: weighted sum, the launch")

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        dout = dout.contiguous()  # one number a row: little to copy
        dx = _dx(dout, x, weight) if ctx.needs_input_grad[0] else None
        return dx, _dweight(dout, x) if ctx.needs_input_grad[1] else None


def _dx(dout: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Gradient of x: an outer product."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx
    columns = x.shape[-1]
    tile = tuning.weighted_sum_dx(columns)
    raise NotImplementedError("Lab 2, exercise 2.4: gradient of x, the launch")


def _dweight(dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of the weight: splits of rows first, then the sum of their sums."""
    if x.numel() == 0:
        return torch.zeros(x.shape[-1], dtype=x.dtype, device=x.device)
    x, rows = as_rows(x)
    tile = tuning.weighted_sum_dweight(rows.columns)
    splits, tiles_per_split = tuning.row_splits(rows.count, rows.columns, tile)
    partial = torch.empty(splits, rows.columns, dtype=torch.float32, device=x.device)
    raise NotImplementedError("Lab 2, exercise 2.4: gradient of the weight, the launches")


def weighted_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``(weight * x).sum(-1)`` in one pass, differentiable in both.

    The weight's gradient is summed over rows in two stages, without atomics: two runs give the same bits.

    Args:
        x: (..., columns) of any strides; float32, float16 or bfloat16, summed in float32.
        weight: (columns,) of x's dtype.

    Returns:
        A tensor of x's leading shape and dtype.

    Raises:
        TypeError, ValueError: dtype, shape or device are not these.
    """
    check_tensor("x", x, least_dims=1)
    check_vector("weight", weight, x)
    return WeightedSum.apply(x, weight)
