"""Cross-entropy of logits in one online pass, and its gradient (exercise 2.4).

For each row ``x`` of logits and its target ``t``, with arithmetic in float32 whatever the dtype::

    lse     = log(sum(exp(x)))                                   one number per row
    loss    = lse - x[t]                                         0 where t is ignore_index
    dlogits = (exp(x - lse) - [column is t]) * dloss             0 where t is ignore_index

Forward, a row is read **once**: its maximum and its sum of exponentials grow together, as in exercise 2.6. A vocabulary
may have 262,144 columns, so no tile holds a row: at most :data:`LARGEST_TILE` logits are on chip at a time.

========  =================================================================  =========================
tensor    shape and dtype                                                    forward, backward
========  =================================================================  =========================
logits    (..., columns), any strides; float32, float16 or bfloat16          read once, read once
target    (...), any strides, int64; from 0 to columns - 1, or ignore_index  a few bytes per row
loss      (...), float32, without gaps                                       written once, not read
dloss     (...), float32, any strides                                        -, a few bytes per row
dlogits   the logits' shape and dtype, without gaps                          -, written once
========  =================================================================  =========================

The forward pass keeps ``logits``, ``target`` and one float32 number per row; the backward pass computes the gradient.
Logits of a row that is ignored need not be read; reading ``x[t]`` again costs one element. A logit may be -inf: it adds
nothing to the sum. ``target`` and ``dloss`` may be copied, which costs a few bytes per row. You choose which program
computes what, how many programs there are, and the tile.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from .arguments import check_tensor
from .rows import as_rows, element_offsets

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: Most logits that a program may hold at a time: half of the 65,536 registers of an SM.
LARGEST_TILE = 32768


### BEGIN SOLUTION 2.4: cross-entropy, your kernels and what launches them
@triton.jit
def cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, lse_ptr, num_rows, columns,
    ignore_index, x_layout, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ``ROWS`` rows, ``BLOCK`` columns at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(target_ptr + row, mask=row < num_rows, other=ignore_index)  # (ROWS,)
    counts = target != ignore_index
    maximum = tl.full((ROWS,), -3.4028234663852886e38, tl.float32)  # finite: -inf - (-inf) is NaN
    total = tl.zeros((ROWS,), dtype=tl.float32)
    chosen = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = counts[:, None] & (column[None, :] < columns)
        x_ptrs = x_ptr + element_offsets(row, column, x_layout)
        x = tl.load(x_ptrs, mask=inside, other=-float("inf")).to(tl.float32)  # (ROWS, BLOCK), used once
        larger = tl.maximum(maximum, tl.max(x, axis=1))
        total = total * tl.exp(maximum - larger) + tl.sum(tl.exp(x - larger[:, None]), axis=1)
        chosen += tl.sum(tl.where(column[None, :] == target[:, None], x, 0.0), axis=1)
        maximum = larger
    tl.store(lse_ptr + row, maximum + tl.log(total), mask=row < num_rows)
    loss = maximum - chosen + tl.log(total)  # in this order: far from 0 the logarithm would lose its digits
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0), mask=row < num_rows)


@triton.jit
def cross_entropy_backward_kernel(
    x_ptr, target_ptr, lse_ptr, dloss_ptr, dx_ptr, num_rows, columns,
    ignore_index, x_layout, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ``ROWS`` rows and ``BLOCK`` columns; programs are counted along the columns first."""
    blocks_per_row = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks_per_row * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row, mask=row < num_rows)  # (ROWS,)
    lse = tl.load(lse_ptr + row, mask=row < num_rows)  # (ROWS,)
    dloss = tl.load(dloss_ptr + row, mask=row < num_rows)  # (ROWS,)
    counts = target != ignore_index
    inside = (row[:, None] < num_rows) & (column[None, :] < columns)
    x_ptrs = x_ptr + element_offsets(row, column, x_layout)
    x = tl.load(x_ptrs, mask=inside & counts[:, None]).to(tl.float32)  # (ROWS, BLOCK)
    hit = tl.where(column[None, :] == target[:, None], 1.0, 0.0)
    dx = tl.where(counts[:, None], (tl.exp(x - lse[:, None]) - hit) * dloss[:, None], 0.0)
    dx_ptrs = dx_ptr + row[:, None] * columns + column[None, :]
    tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def logit_tile(columns: int) -> tuple[int, int]:
    """Rows and columns of a tile: whole rows where they are short."""
    elements = 4096
    block = min(elements, triton.next_power_of_2(columns))
    return elements // block, block


class CrossEntropy(torch.autograd.Function):
    """The loss of each row; keeps the logits, which are there anyway, and one number per row."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
        target = target.contiguous()  # one number per row: little to copy
        loss = logits.new_empty(target.shape, dtype=torch.float32)
        lse = logits.new_empty(target.shape, dtype=torch.float32)
        ctx.save_for_backward(logits, target, lse)
        ctx.ignore_index = ignore_index
        x, rows = as_rows(logits)
        height, block = logit_tile(rows.columns)
        cross_entropy_kernel[(triton.cdiv(rows.count, height),)](
            x, target, loss, lse, rows.count, rows.columns, ignore_index, rows.layout_args,
            ROWS=height, BLOCK=block, num_warps=8,
        )  # fmt: skip
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, target, lse = ctx.saved_tensors
        dlogits = logits.new_empty(logits.shape)
        x, rows = as_rows(logits)
        height, block = logit_tile(rows.columns)
        grid = (triton.cdiv(rows.count, height) * triton.cdiv(rows.columns, block),)
        cross_entropy_backward_kernel[grid](
            x, target, lse, dloss.contiguous(), dlogits, rows.count, rows.columns, ctx.ignore_index, rows.layout_args,
            ROWS=height, BLOCK=block, num_warps=8,
        )  # fmt: skip
        return dlogits, None, None


### END SOLUTION


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """``logsumexp(logits) - logits[target]`` of each row, differentiable in ``logits``.

    Args:
        logits: (..., columns) of any strides, one column at least; float32, float16 or bfloat16.
        target: (...) int64 of any strides: the row's right column, or ``ignore_index``.
        ignore_index: the target of rows whose loss and gradient are 0.

    Returns:
        (...) float32: the loss of each row, not their mean. A second derivative is refused.

    Raises:
        TypeError, ValueError: dtype, shape or device are not these.
    """
    check_tensor("logits", logits, least_dims=1)
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64, got {str(target.dtype).removeprefix('torch.')}")
    if target.shape != logits.shape[:-1] or logits.shape[-1] == 0:
        raise ValueError(
            f"target must have shape {tuple(logits.shape[:-1])}, one column number for each row of logits "
            f"{tuple(logits.shape)}, got {tuple(target.shape)}"
        )
    if target.device != logits.device:
        raise ValueError(f"target must be on the logits' device {logits.device}, got {target.device}")
    ### BEGIN SOLUTION 2.4: cross-entropy
    return CrossEntropy.apply(logits, target, ignore_index)
    ### END SOLUTION
