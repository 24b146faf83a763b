"""Putting the parts of a split context together (exercise 5.5)."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from . import tuning
from .paged_arguments import FLOATS, check_same, check_tensor, dtype_name

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["stride_ls", "stride_lh", "heads", "parts"])
def merge_parts_kernel(
    outputs_ptr, logsumexps_ptr, o_ptr,
    stride_is, stride_ih, stride_ip, stride_id, stride_ls, stride_lh, stride_lp, stride_os, stride_oh, stride_od,
    heads, parts,
    BLOCK_P: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: all parts of one head of one sequence, ``BLOCK_P`` at a time."""
    sequence, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    outputs_ptr += sequence * stride_is + head * stride_ih
    logsumexps_ptr += sequence * stride_ls + head * stride_lh
    m = -1e30  # finite: -inf minus -inf would be NaN
    d = 0.0
    o = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, parts, BLOCK_P):
        raise NotImplementedError("Lab 5, exercise 5.5: merging parts")
    o = o / tl.where(d == 0, 1.0, d)
    o_place = sequence * stride_os + head * stride_oh + column.to(tl.int64) * stride_od
    tl.store(o_ptr + o_place, o.to(o_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def merge_parts(outputs: torch.Tensor, logsumexps: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Attention over a whole context from attention over its parts.

    With L_p the logsumexp of part p and o_p its output, the whole is sum_p exp(L_p) o_p / sum_p exp(L_p): the operator
    of lecture 05 on parts that have been divided by their sums (Dao et al. 2023, "Flash-Decoding").

    Args:
        outputs: (S, H, P, D) float32, any strides; D up to 256.
        logsumexps: (S, H, P) float32; -inf for an empty part, whose output is not read.
        dtype: Of the result.

    Returns:
        (S, H, D); 0 where all parts are empty.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    check_tensor("outputs", outputs, "(S, H, P, D)", (torch.float32,))
    check_tensor("logsumexps", logsumexps, "(S, H, P)", (torch.float32,))
    check_same("logsumexps", logsumexps, tuple(outputs.shape[:3]), "as outputs without its last axis")
    if dtype not in FLOATS:
        raise TypeError(f"dtype must be float32, float16 or bfloat16, got {dtype_name(dtype)}")
    S, H, P, D = outputs.shape
    o = torch.empty((S, H, D), dtype=dtype, device=outputs.device)
    if not o.numel():
        return o
    block_d = tuning.block_d(D)
    tile = tuning.merge(P, block_d)
    merge_parts_kernel[(S * H,)](
        outputs, logsumexps, o, *outputs.stride(), *logsumexps.stride(), *o.stride(), H, P,
        BLOCK_P=tile.n, HEAD_DIM=D, BLOCK_D=block_d, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return o
