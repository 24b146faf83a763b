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


# Lab 2, exercise 2.4: cross-entropy, your kernels and what launches them


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
    raise NotImplementedError("Lab 2, exercise 2.4: cross-entropy")
