"""The second stage of a gradient that sums over rows: partial sums of splits of rows become one vector."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def column_sums_kernel(partial_ptr, out_ptr, splits, columns, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the sums of ``BLOCK`` columns of ``partial`` (splits, columns), always in the same order."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((SPLITS, BLOCK), dtype=tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        mask = (split[:, None] < splits) & (column[None, :] < columns)
        total += tl.load(partial_ptr + split[:, None] * columns + column[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < columns)


def column_sums(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum ``partial`` (splits, columns) float32, contiguous, over its splits, as (columns,) of ``dtype``.

    Atomic additions would need no second stage, but would add in another order on each run: floating-point sums
    depend on the order, so the gradient would not be reproducible.
    """
    splits, columns = partial.shape
    out = torch.empty(columns, dtype=dtype, device=partial.device)
    tile = tuning.COLUMN_SUMS
    column_sums_kernel[(triton.cdiv(columns, tile.block),)](
        partial, out, splits, columns, SPLITS=tile.rows, BLOCK=tile.block, num_warps=tile.warps
    )
    return out
