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

# Lab 2, exercise 2.3: RMSNorm, your kernels and what launches them


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
    raise NotImplementedError("Lab 2, exercise 2.3: RMSNorm")
