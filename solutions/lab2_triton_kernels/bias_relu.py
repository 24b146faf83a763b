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
    ### BEGIN SOLUTION 2.2: bias and ReLU
    blocks_per_row = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < num_rows) & (column[None, :] < columns)
    bias = tl.load(bias_ptr + col_offset(column, stride_bias, INT64), mask=column < columns, other=0.0)  # (BLOCK,)
    x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
    x_ptrs = x_row[:, None] + col_offset(column, stride_col, INT64)[None, :]
    x = tl.load(x_ptrs, mask=inside, eviction_policy="evict_last")  # (ROWS, BLOCK)
    y = x.to(tl.float32) + bias.to(tl.float32)[None, :]
    y = tl.where(y < 0, 0.0, y)  # a NaN is not below 0 and stays
    out_ptrs = out_ptr + row[:, None] * columns + column[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    ### END SOLUTION


@triton.jit
def bias_relu_backward_kernel(
    dout_ptr, out_ptr, dx_ptr, partial_ptr, num_rows, columns,
    size_1, size_2, stride_0, stride_1, stride_2, stride_col, tiles_per_split,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``BLOCK`` columns of ``tiles_per_split`` tiles of ``ROWS`` rows, and the sums of these columns."""
    ### BEGIN SOLUTION 2.2: backward of bias and ReLU
    blocks_per_row = tl.cdiv(columns, BLOCK)
    split = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    column = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    dbias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in tl.range(0, tiles_per_split, num_stages=STAGES):  # the next tiles are on their way while one is added
        row = (split * tiles_per_split + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < num_rows) & (column[None, :] < columns)
        offs = row[:, None] * columns + column[None, :]
        dout_row = dout_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
        dout = tl.load(
            dout_row[:, None] + col_offset(column, stride_col, INT64)[None, :], mask=inside, other=0.0
        )  # (ROWS, BLOCK)
        out = tl.load(out_ptr + offs, mask=inside, other=0.0)  # (ROWS, BLOCK): 0 where the ReLU cut
        dx = tl.where(out <= 0, 0.0, dout.to(tl.float32))
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dbias += dx
    tl.store(partial_ptr + split * columns + column, tl.sum(dbias, axis=0), mask=column < columns)
    ### END SOLUTION


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
        ### BEGIN SOLUTION 2.2: bias and ReLU, the launch
        grid = (triton.cdiv(rows.count, tile.rows) * triton.cdiv(rows.columns, tile.block),)
        bias_relu_kernel[grid](
            x, bias, out, rows.count, rows.columns, *rows.layout_args, bias.stride(0),
            ROWS=tile.rows, BLOCK=tile.block, INT64=rows.needs_int64 or bias.stride(0) > 1, num_warps=tile.warps,
        )  # fmt: skip
        return out
        ### END SOLUTION

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
        ### BEGIN SOLUTION 2.2: backward of bias and ReLU, the launch
        bias_relu_backward_kernel[(splits * triton.cdiv(rows.columns, tile.block),)](
            dout, out, dx, partial, rows.count, rows.columns, *rows.layout_args, tiles_per_split,
            ROWS=tile.rows, BLOCK=tile.block, INT64=rows.needs_int64, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
        return dx, column_sums(partial, out.dtype)
        ### END SOLUTION


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
