"""RMSNorm over the last axis, and its backward pass (exercise 2.3).

For each row ``x`` of ``columns`` elements, with arithmetic in float32 whatever the dtype (Zhang and Sennrich 2019)::

    rstd = 1 / sqrt(mean(x * x) + eps)                           one number per row
    out  = x * rstd * weight

and backward, where ``dout`` arrives and ``normed`` is ``x * rstd``::

    dx      = rstd * (dout * weight - normed * mean(dout * weight * normed))
    dweight = sum over all rows of dout * normed

========  =================================================================  =========================
tensor    shape and dtype                                                    forward, backward
========  =================================================================  =========================
x         (..., columns), any strides; float32, float16 or bfloat16          read once, read once
weight    (columns,), any stride, x's dtype                                  at most once per row
out       x's shape and dtype, without gaps                                  written once, not read
dout      x's shape and dtype, any strides                                   -, read once
dx        x's shape and dtype, without gaps                                  -, written once
dweight   (columns,), x's dtype                                              -, written once
========  =================================================================  =========================

The forward pass keeps ``x``, ``weight`` and one float32 number per row. Partial sums of dweight: float32, at most
ceil(rows / 16) rows of them, written once and read once. No atomics: two runs give the same bits. You choose which
program takes which rows, how many programs there are, and the tile.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .arguments import check_tensor, check_vector
from .column_sums import column_sums
from .rows import as_rows, element_offsets

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: Columns of the longest row: a program can hold it.
LONGEST_ROW = 8192

### BEGIN SOLUTION 2.3: RMSNorm, your kernels and what launches them
#: Splits of rows that the backward pass aims at: four for each SM of an H100, and the same on every GPU, so that the
#: order of the sums is the same, too.
SPLITS = 528


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, rstd_ptr, num_rows, columns,
    eps, x_layout, stride_weight, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` whole rows, on chip from the load to the store."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < num_rows) & (column[None, :] < columns)
    x_ptrs = x_ptr + element_offsets(row, column, x_layout)
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)  # (ROWS, BLOCK), zeros past the end of a row
    weight_ptrs = weight_ptr + column * stride_weight
    weight = tl.load(weight_ptrs, mask=column < columns).to(tl.float32)  # (BLOCK,)
    rstd = 1 / tl.sqrt(tl.sum(x * x, axis=1) / columns + eps)
    out = x * rstd[:, None] * weight[None, :]
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)
    out_ptrs = out_ptr + row[:, None] * columns + column[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    dout_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, num_rows, columns, dout_layout, x_layout, stride_weight,
    tiles_per_split, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: a split of ``tiles_per_split`` tiles of ``ROWS`` whole rows; the sums for dweight last."""
    split = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    weight_ptrs = weight_ptr + column * stride_weight
    weight = tl.load(weight_ptrs, mask=column < columns, other=0.0).to(tl.float32)  # (BLOCK,), for the whole split
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in tl.range(0, tiles_per_split, num_stages=STAGES):  # the next tile is on its way while this one is used
        row = (split * tiles_per_split + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < num_rows) & (column[None, :] < columns)
        x_ptrs = x_ptr + element_offsets(row, column, x_layout)
        x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)  # (ROWS, BLOCK)
        dout_ptrs = dout_ptr + element_offsets(row, column, dout_layout)
        dout = tl.load(dout_ptrs, mask=inside, other=0.0).to(tl.float32)  # (ROWS, BLOCK)
        rstd = tl.load(rstd_ptr + row, mask=row < num_rows, other=0.0)  # (ROWS,)
        normed = x * rstd[:, None]
        scaled = dout * weight[None, :]
        mean = tl.sum(scaled * normed, axis=1) / columns
        dx = rstd[:, None] * (scaled - normed * mean[:, None])
        dx_ptrs = dx_ptr + row[:, None] * columns + column[None, :]
        tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dweight += dout * normed
    tl.store(partial_ptr + split * columns + column, tl.sum(dweight, axis=0), mask=column < columns)


def row_tile(columns: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and its warps: each thread holds 16 elements."""
    block = triton.next_power_of_2(columns)
    rows = max(1, 4096 // block)
    return rows, block, rows * block // 512


class RMSNorm(torch.autograd.Function):
    """``x * rstd * weight``; the backward pass computes nothing again but the product of x and rstd."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x_rows, rows = as_rows(x)
        out = x.new_empty(x.shape)
        rstd = x.new_empty(rows.count, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        if x.numel() == 0:
            return out
        height, block, warps = row_tile(rows.columns)
        rms_norm_kernel[(triton.cdiv(rows.count, height),)](
            x_rows, weight, out, rstd, rows.count, rows.columns, eps, rows.layout_args, weight.stride(0),
            ROWS=height, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dx = x.new_empty(x.shape)
        if x.numel() == 0:
            return dx, torch.zeros_like(weight), None
        x, rows = as_rows(x)
        dout, dout_rows = as_rows(dout)
        height, block, warps = row_tile(rows.columns)
        tiles = triton.cdiv(rows.count, height)
        tiles_per_split = triton.cdiv(tiles, min(SPLITS, triton.cdiv(rows.count, 16)))
        splits = triton.cdiv(tiles, tiles_per_split)
        partial = x.new_empty(splits, rows.columns, dtype=torch.float32)
        rms_norm_backward_kernel[(splits,)](
            dout, x, weight, rstd, dx, partial, rows.count, rows.columns, dout_rows.layout_args, rows.layout_args,
            weight.stride(0), tiles_per_split, ROWS=height, BLOCK=block, STAGES=2, num_warps=warps,
        )  # fmt: skip
        return dx, column_sums(partial, x.dtype), None


### END SOLUTION


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """``x / sqrt(mean(x * x) + eps) * weight`` over the last axis, differentiable in ``x`` and ``weight``.

    Args:
        x: (..., columns) of any strides, at most :data:`LONGEST_ROW` columns; float32, float16 or bfloat16.
        weight: (columns,) of x's dtype.
        eps: added to the mean of the squares, so that a row of zeros gives zeros.

    Returns:
        A contiguous tensor of x's shape and dtype. A second derivative is refused.

    Raises:
        TypeError, ValueError: dtype, shape or device are not these.
    """
    check_tensor("x", x, least_dims=1)
    check_vector("weight", weight, x)
    if x.shape[-1] > LONGEST_ROW:
        raise ValueError(f"x must have at most {LONGEST_ROW:,} columns, got {x.shape[-1]:,}")
    ### BEGIN SOLUTION 2.3: RMSNorm
    return RMSNorm.apply(x, weight, eps)
    ### END SOLUTION
