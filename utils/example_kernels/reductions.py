"""Kernels that combine elements: row softmax, a dot product in two stages, and a histogram by atomics."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.example_kernels.traffic import Traffic, cdiv, next_power_of_two, same_dtype, size, tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: Longest row that one program keeps on chip; a longer one is read twice.
WIDEST_ROW = 16384
DOT_BLOCK = 1024
HISTOGRAM_BLOCK = 1024


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, stride_x, stride_out, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=-float("inf")).to(tl.float32)  # (BLOCK,), the row
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row * stride_out + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_long_kernel(x_ptr, out_ptr, columns, stride_x, stride_out, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    maximum = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x + offsets, mask=offsets < columns, other=-float("inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(x - new_maximum), axis=0)
        maximum = new_maximum
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < columns
        x = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=-float("inf")).to(tl.float32)  # (BLOCK,), again
        y = tl.exp(x - maximum) / total
        tl.store(out_ptr + row * stride_out + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


def softmax(x: torch.Tensor, widest_row: int = WIDEST_ROW) -> torch.Tensor:
    """Softmax of each row of ``x`` (rows, columns); ``x``'s rows have unit stride, their pitch is free.

    A row of up to ``widest_row`` elements is read once; a longer one twice, with the online maximum and sum
    (Milakov and Gimelshein 2018, algorithm 3).

    Raises:
        TypeError, ValueError: ``x`` is no float matrix with rows of unit stride here, or has no columns.
    """
    tensor("x", x, 2)
    rows, columns = x.shape
    if columns == 0:
        raise ValueError(f"x must have at least one column, got shape {tuple(x.shape)}")
    if columns > 1 and x.stride(1) != 1:
        raise ValueError(f"x's last axis must have stride 1, got {x.stride(1)}")
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows and columns <= widest_row:
        block = next_power_of_two(columns)
        warps = 4 if block < 2048 else 8 if block < 8192 else 16
        softmax_kernel[(rows,)](x, out, columns, x.stride(0), out.stride(0), BLOCK=block, num_warps=warps)
    elif rows:
        block = next_power_of_two(widest_row + 1) // 2
        warps = 4 if block < 2048 else 8 if block < 8192 else 16
        softmax_long_kernel[(rows,)](x, out, columns, x.stride(0), out.stride(0), BLOCK=block, num_warps=warps)
    return out


def softmax_traffic(rows: int, columns: int, element_size: int, widest_row: int = WIDEST_ROW) -> Traffic:
    """Traffic of :func:`softmax`: one read, or two for rows longer than ``widest_row``, and one write."""
    nbytes = size("rows", rows) * size("columns", columns, 1) * size("element_size", element_size, 1)
    return Traffic(nbytes * (1 if columns <= widest_row else 2), nbytes)


@triton.jit
def dot_partial_kernel(x_ptr, y_ptr, partial_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # (BLOCK,)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # (BLOCK,)
    tl.store(partial_ptr + pid, tl.sum(x * y, axis=0))


@triton.jit
def sum_kernel(partial_ptr, out_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + offsets, mask=offsets < n, other=0.0)  # (BLOCK,)
    tl.store(out_ptr, tl.sum(total, axis=0))


def dot_product(x: torch.Tensor, y: torch.Tensor, block: int = DOT_BLOCK) -> torch.Tensor:
    """Dot product of contiguous ``x`` (n,) and ``y`` (n,), as a float32 scalar tensor: partial sums, then their sum.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device or stride, or the lengths differ.
    """
    tensor("x", x, 1)
    tensor("y", y, 1)
    same_dtype(x=x, y=y)
    if x.shape != y.shape:
        raise ValueError(f"x and y must have one length, got {x.numel()} and {y.numel()}")
    if not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError(f"x and y must be contiguous, got strides {x.stride(0)} and {y.stride(0)}")
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    programs = cdiv(x.numel(), block)
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    out = torch.empty((), dtype=torch.float32, device=x.device)
    dot_partial_kernel[(programs,)](x, y, partial, x.numel(), BLOCK=block)
    sum_kernel[(1,)](partial, out, programs, BLOCK=block)
    return out


def dot_product_traffic(n: int, element_size: int, block: int = DOT_BLOCK) -> Traffic:
    """Traffic of :func:`dot_product`: both vectors, and the float32 partial sums written and read back.

    Its 2n FLOPs run outside ``tl.dot``, so ``flops`` is 0 here.
    """
    if size("n", n) == 0:
        return Traffic(0, 0)
    programs = cdiv(n, block)
    return Traffic(2 * n * size("element_size", element_size, 1) + 4 * programs, 4 * programs + 4)


@triton.jit
def histogram_kernel(x_ptr, counts_ptr, n, bins, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.load(x_ptr + offsets, mask=mask, other=-1)  # (BLOCK,) int32
    inside = (value >= 0) & (value < bins)
    tl.atomic_add(counts_ptr + value, 1, mask=inside, sem="relaxed")


def histogram(x: torch.Tensor, bins: int, block: int = HISTOGRAM_BLOCK) -> torch.Tensor:
    """How often each of 0 ... bins-1 occurs in a contiguous ``x`` (n,) int32, as (bins,) int32; others are ignored.

    Raises:
        TypeError, ValueError: ``x`` is not a contiguous int32 vector here, or ``bins`` is not positive.
    """
    tensor("x", x, 1, (torch.int32,))
    size("bins", bins, 1)
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got stride {x.stride(0)}")
    counts = torch.zeros(bins, dtype=torch.int32, device=x.device)
    if x.numel():
        histogram_kernel[(cdiv(x.numel(), block),)](x, counts, x.numel(), bins, BLOCK=block)
    return counts


def histogram_traffic(n: int, inside: int | None = None) -> Traffic:
    """Traffic of :func:`histogram` on ``n`` values of which ``inside`` (all by default) fall in a bin.

    An atomic add reads and writes its 4 bytes.
    """
    inside = size("n", n) if inside is None else size("inside", inside)
    if inside > n:
        raise ValueError(f"inside must be at most n = {n}, got {inside}")
    return Traffic(4 * n + 4 * inside, 4 * inside, bytes_atomic=4 * inside)
