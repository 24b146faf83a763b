"""The weighted sum of each row, and its backward pass (exercises 2.3 and 2.4)."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .arguments import check_tensor, check_vector
from .column_sums import column_sums
from .rows import along, as_rows, row_offset

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def weighted_sum_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, columns, size_1, size_2, stride_0, stride_1, stride_2, step, weight_step,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` whole rows, ``BLOCK`` columns at a time."""
    ### BEGIN SOLUTION 2.3: weighted sum
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)  # each lane adds up its own columns; they meet at the end
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        weight = tl.load(weight_ptr + along(column, weight_step, WIDE), mask=column < columns, other=0.0)  # (BLOCK,)
        inside = (row[:, None] < num_rows) & (column[None, :] < columns)
        x = tl.load(x_row[:, None] + along(column, step, WIDE)[None, :], mask=inside, other=0.0)  # (ROWS, BLOCK)
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    tl.store(out_ptr + row, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=row < num_rows)
    ### END SOLUTION


@triton.jit
def weighted_sum_backward_kernel(
    dout_ptr, x_ptr, weight_ptr, dx_ptr, partial_ptr, num_rows, columns,
    size_1, size_2, stride_0, stride_1, stride_2, step, weight_step, tiles_per_strip,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: ``tiles_per_strip`` tiles of ``ROWS`` rows below one another, and their part of the weight's gradient.

    ``dx_ptr`` or ``partial_ptr`` is None when nobody asks for that gradient.
    """
    ### BEGIN SOLUTION 2.4: backward of the weighted sum
    blocks_per_row = tl.cdiv(columns, BLOCK)
    strip = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    column = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + along(column, weight_step, WIDE), mask=column < columns, other=0.0)  # (BLOCK,)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in range(0, tiles_per_strip):
        row = (strip * tiles_per_strip + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < num_rows) & (column[None, :] < columns)
        dout = tl.load(dout_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)  # (ROWS,)
        if dx_ptr is not None:
            dx = dout[:, None] * weight.to(tl.float32)[None, :]  # d(sum_j w_j x_ij) / dx_ij = w_j
            dx_place = dx_ptr + row[:, None] * columns + column[None, :]
            tl.store(dx_place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if partial_ptr is not None:
            x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
            x = tl.load(x_row[:, None] + along(column, step, WIDE)[None, :], mask=inside, other=0.0)  # (ROWS, BLOCK)
            dweight += dout[:, None] * x.to(tl.float32)
    if partial_ptr is not None:
        tl.store(partial_ptr + strip * columns + column, tl.sum(dweight, axis=0), mask=column < columns)
    ### END SOLUTION


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
        ### BEGIN SOLUTION 2.3: weighted sum, the launch
        weighted_sum_kernel[(triton.cdiv(rows.count, tile.rows),)](
            x, weight, out, rows.count, rows.columns, *rows.place, weight.stride(0),
            ROWS=tile.rows, BLOCK=tile.block, WIDE=rows.wide or weight.stride(0) > 1, num_warps=tile.warps,
        )  # fmt: skip
        return out
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if ctx.needs_input_grad[0] else None
        if x.numel() == 0:
            return dx, torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        dout = dout.contiguous()  # one number a row: little to copy
        x, rows = as_rows(x)
        tile = tuning.weighted_sum_backward(rows.columns)
        strips, tiles_per_strip = tuning.strips(rows.count, rows.columns, tile)
        partial = None
        if ctx.needs_input_grad[1]:
            partial = torch.empty(strips, rows.columns, dtype=torch.float32, device=x.device)
        ### BEGIN SOLUTION 2.4: backward of the weighted sum, the launch
        weighted_sum_backward_kernel[(strips * triton.cdiv(rows.columns, tile.block),)](
            dout, x, weight, dx, partial, rows.count, rows.columns, *rows.place, weight.stride(0), tiles_per_strip,
            ROWS=tile.rows, BLOCK=tile.block, WIDE=rows.wide or weight.stride(0) > 1, num_warps=tile.warps,
        )  # fmt: skip
        return dx, None if partial is None else column_sums(partial, weight.dtype)
        ### END SOLUTION


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
