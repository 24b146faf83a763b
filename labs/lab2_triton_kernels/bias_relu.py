"""Bias and ReLU fused, and their backward pass (exercise 2.2)."""

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
def bias_relu_kernel(
    x_ptr, bias_ptr, out_ptr, num_rows, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_col, stride_bias,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ``ROWS`` rows and ``BLOCK`` columns; its part of the bias is loaded once."""
    raise NotImplementedError("Lab 2, exercise 2.2: bias and ReLU")


@triton.jit
def bias_relu_backward_kernel(
    dout_ptr, out_ptr, dx_ptr, partial_ptr, num_rows, columns,
    size_1, size_2, stride_0, stride_1, stride_2, stride_col, tiles_per_split,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK`` columns of ``tiles_per_split`` tiles of ``ROWS`` rows, and the sums of these columns."""
    raise NotImplementedError("Lab 2, exercise 2.2: backward of bias and ReLU")


class BiasReLU(torch.autograd.Function):
    """``relu(x + bias)``; keeps only its output for the backward pass, which the next layer keeps anyway."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ctx.save_for_backward(out)
        if x.numel() == 0:
            return out
        x, rows = as_rows(x)
        tile = tuning.bias_relu(rows.columns)
        raise NotImplementedError("Lab 2, exercise 2.2: bias and ReLU, the launch")

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (out,) = ctx.saved_tensors
        dx = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        if out.numel() == 0:
            return dx, torch.zeros(out.shape[-1], dtype=out.dtype, device=out.device)
        dout, rows = as_rows(dout)
        tile = tuning.bias_relu_backward(rows.columns)
        splits, tiles_per_split = tuning.row_splits(rows.count, rows.columns, tile)
        partial = torch.empty(splits, rows.columns, dtype=torch.float32, device=out.device)
        raise NotImplementedError("Lab 2, exercise 2.2: backward of bias and ReLU, the launch")


def bias_relu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``relu(x + bias)`` in one pass, differentiable in both.

    The gradient of the bias is summed over rows in two stages, without atomics: two runs give the same bits.
    NaN stays NaN, as in ``torch.relu``, and lets the gradient pass.

    Args:
        x: (..., columns) of any strides; float32, float16 or bfloat16.
        bias: (columns,) of x's dtype.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError, ValueError: dtype, shape or device are not these.
    """
    check_tensor("x", x, least_dims=1)
    check_vector("bias", bias, x)
    return BiasReLU.apply(x, bias)
