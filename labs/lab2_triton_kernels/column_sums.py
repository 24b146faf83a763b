"""The second stage of a gradient that sums over rows: partial sums of strips of rows become one vector."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def column_sums_kernel(partial_ptr, out_ptr, strips, columns, STRIPS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the sums of ``BLOCK`` columns of ``partial`` (strips, columns), always in the same order."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((STRIPS, BLOCK), dtype=tl.float32)
    for start in range(0, strips, STRIPS):
        strip = start + tl.arange(0, STRIPS)
        mask = (strip[:, None] < strips) & (column[None, :] < columns)
        total += tl.load(partial_ptr + strip[:, None] * columns + column[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < columns)


def column_sums(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum ``partial`` (strips, columns) float32, contiguous, over its strips, as (columns,) of ``dtype``.

    Atomic additions would need no second stage, but would add in another order on each run: floating-point sums
    depend on the order, so the gradient would not be reproducible.
    """
    strips, columns = partial.shape
    out = torch.empty(columns, dtype=dtype, device=partial.device)
    tile = tuning.COLUMN_SUMS
    column_sums_kernel[(triton.cdiv(columns, tile.block),)](
        partial, out, strips, columns, STRIPS=tile.rows, BLOCK=tile.block, num_warps=tile.warps
    )
    return out
