"""The weighted sum of each row, and its backward pass: given, as lecture 04 derives them."""

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
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)  # each lane adds up its own columns; they meet at the end
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        weight_ptrs = weight_ptr + col_offset(column, stride_weight, INT64)
        weight = tl.load(weight_ptrs, mask=column < columns, other=0.0, eviction_policy="evict_last")  # (BLOCK,)
        inside = (row[:, None] < num_rows) & (column[None, :] < columns)
        x_ptrs = x_row[:, None] + col_offset(column, stride_col, INT64)[None, :]
        x = tl.load(x_ptrs, mask=inside, other=0.0, eviction_policy="evict_first")  # (ROWS, BLOCK), never again
        total += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    tl.store(out_ptr + row, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=row < num_rows)


@triton.jit
def weighted_sum_dx_kernel(
    dout_ptr, weight_ptr, dx_ptr, num_rows, columns, stride_weight,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ``ROWS`` rows and ``BLOCK`` columns of dx. It reads no x: this kernel only writes."""
    blocks_per_row = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < num_rows) & (column[None, :] < columns)
    weight = tl.load(  # (BLOCK,)
        weight_ptr + col_offset(column, stride_weight, INT64), mask=column < columns, other=0.0
    )
    dout = tl.load(dout_ptr + row, mask=row < num_rows, other=0.0)  # (ROWS,)
    dx = dout.to(tl.float32)[:, None] * weight.to(tl.float32)[None, :]  # d(sum_j w_j x_ij) / dx_ij = w_j
    dx_ptrs = dx_ptr + row[:, None] * columns + column[None, :]
    tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit
def weighted_sum_dweight_kernel(
    dout_ptr, x_ptr, partial_ptr, num_rows, columns, size_1, size_2, stride_0, stride_1, stride_2, stride_col,
    tiles_per_split,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, INT64: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ``tiles_per_split`` tiles of ``ROWS`` rows below one another, summed over their rows.

    Each lane adds up its own rows. The lanes of a column meet at the end, the splits in :func:`column_sums`.
    """
    blocks_per_row = tl.cdiv(columns, BLOCK)
    split = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    column = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in tl.range(0, tiles_per_split, num_stages=STAGES):  # the next tiles are on their way while one is added
        row = (split * tiles_per_split + tile) * ROWS + tl.arange(0, ROWS)
        dout = tl.load(dout_ptr + row, mask=row < num_rows, other=0.0).to(tl.float32)  # (ROWS,)
        x_row = x_ptr + row_offset(row, size_1, size_2, stride_0, stride_1, stride_2)
        inside = (row[:, None] < num_rows) & (column[None, :] < columns)
        x = tl.load(
            x_row[:, None] + col_offset(column, stride_col, INT64)[None, :], mask=inside, other=0.0
        )  # (ROWS, BLOCK)
        dweight += dout[:, None] * x.to(tl.float32)  # d(sum_j w_j x_ij) / dw_j = x_ij
    tl.store(partial_ptr + split * columns + column, tl.sum(dweight, axis=0), mask=column < columns)


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
        weighted_sum_kernel[(triton.cdiv(rows.count, tile.rows),)](
            x, weight, out, rows.count, rows.columns, *rows.layout_args, weight.stride(0),
            ROWS=tile.rows, BLOCK=tile.block, INT64=rows.needs_int64 or weight.stride(0) > 1, num_warps=tile.warps,
        )  # fmt: skip
        return out

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
    grid = (triton.cdiv(dout.numel(), tile.rows) * triton.cdiv(columns, tile.block),)
    weighted_sum_dx_kernel[grid](
        dout, weight, dx, dout.numel(), columns, weight.stride(0),
        ROWS=tile.rows, BLOCK=tile.block, INT64=weight.stride(0) > 1, num_warps=tile.warps,
    )  # fmt: skip
    return dx


def _dweight(dout: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of the weight: splits of rows first, then the sum of their sums."""
    if x.numel() == 0:
        return torch.zeros(x.shape[-1], dtype=x.dtype, device=x.device)
    x, rows = as_rows(x)
    tile = tuning.weighted_sum_dweight(rows.columns)
    splits, tiles_per_split = tuning.row_splits(rows.count, rows.columns, tile)
    partial = torch.empty(splits, rows.columns, dtype=torch.float32, device=x.device)
    weighted_sum_dweight_kernel[(splits * triton.cdiv(rows.columns, tile.block),)](
        dout, x, partial, rows.count, rows.columns, *rows.layout_args, tiles_per_split,
        ROWS=tile.rows, BLOCK=tile.block, INT64=rows.needs_int64, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return column_sums(partial, x.dtype)


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
