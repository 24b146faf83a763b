"""Kernels that touch each element once: copies along several patterns, GeLU, and a gather of rows."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.example_kernels.traffic import FLOATS, Traffic, cdiv, size, tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: Elements a program handles; 1024 keeps 4 warps at 8 elements a thread, enough for 16-byte accesses of any dtype.
BLOCK = 1024
COPYABLE = (*FLOATS, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64)


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offsets, x, mask=mask)


def copy(x: torch.Tensor, out: torch.Tensor | None = None, block: int = BLOCK) -> torch.Tensor:
    """Copy ``x`` (n,) into ``out`` (n,), both of unit stride; a view that starts off a 32-byte boundary is welcome.

    Raises:
        TypeError, ValueError: A tensor has the wrong dtype, rank, device, stride or length.
    """
    tensor("x", x, 1, COPYABLE)
    out = torch.empty_like(x) if out is None else tensor("out", out, 1, (x.dtype,))
    for name, value in (("x", x), ("out", out)):
        if value.numel() > 1 and value.stride(0) != 1:
            raise ValueError(f"{name} must have stride 1, got {value.stride(0)} (strided_copy takes a stride)")
    if out.shape != x.shape:
        raise ValueError(f"out must have x's shape {tuple(x.shape)}, got {tuple(out.shape)}")
    if x.numel():
        copy_kernel[(cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out


def copy_traffic(n: int, element_size: int) -> Traffic:
    """Traffic of :func:`copy`: each element once in, once out."""
    nbytes = size("n", n) * size("element_size", element_size, 1)
    return Traffic(nbytes, nbytes)


@triton.jit
def strided_copy_kernel(x_ptr, out_ptr, n_out, stride, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_out
    x = tl.load(x_ptr + offsets * stride, mask=mask)  # (BLOCK,), every stride-th element
    tl.store(out_ptr + offsets, x, mask=mask)


def strided_copy(x: torch.Tensor, stride: int, block: int = BLOCK) -> torch.Tensor:
    """Return ``x[::stride]`` of a contiguous ``x`` (n,): the read is strided, the write contiguous.

    Raises:
        TypeError, ValueError: ``stride`` is not a positive integer, or ``x`` is not a contiguous vector here.
    """
    tensor("x", x, 1, COPYABLE)
    size("stride", stride, 1)
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got stride {x.stride(0)}")
    n_out = cdiv(x.numel(), stride)
    out = torch.empty(n_out, dtype=x.dtype, device=x.device)
    if n_out:
        strided_copy_kernel[(cdiv(n_out, block),)](x, out, n_out, stride, BLOCK=block)
    return out


def strided_copy_traffic(n: int, stride: int, element_size: int) -> Traffic:
    """Traffic of :func:`strided_copy` as requested; the 32-byte sectors it moves are up to ``stride`` times as many."""
    nbytes = cdiv(size("n", n), size("stride", stride, 1)) * size("element_size", element_size, 1)
    return Traffic(nbytes, nbytes)


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)  # (BLOCK,), computed in fp32 whatever the dtype
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


def gelu(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """GeLU of a contiguous ``x`` of any shape, exact form ``x Phi(x)`` (Hendrycks and Gimpel 2016, equation 1).

    Raises:
        TypeError, ValueError: ``x`` is not a contiguous float16, bfloat16 or float32 tensor here.
    """
    tensor("x", x, x.ndim if isinstance(x, torch.Tensor) else 1)
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")
    out = torch.empty_like(x)
    if x.numel():
        gelu_kernel[(cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out


def gelu_traffic(n: int, element_size: int) -> Traffic:
    """Traffic of :func:`gelu`: fused, so each element once in, once out."""
    return copy_traffic(n, element_size)


@triton.jit
def gather_kernel(table_ptr, index_ptr, out_ptr, width, stride_table, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    index = tl.load(index_ptr + row)  # scalar: which row of the table
    values = tl.load(table_ptr + index * stride_table + columns, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + row * width + columns, values, mask=mask)


def gather(table: torch.Tensor, index: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Embedding lookup: rows ``index`` (n,) int64 of ``table`` (rows, width), as a contiguous (n, width).

    Raises:
        TypeError, ValueError: Wrong dtype, rank or device, or ``table``'s rows are not of unit stride.
        IndexError: An index is not a row of the table.
    """
    tensor("table", table, 2, COPYABLE)
    tensor("index", index, 1, (torch.int64,))
    rows, width = table.shape
    if width > 1 and table.stride(1) != 1:
        raise ValueError(f"table's last axis must have stride 1, got {table.stride(1)}")
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= rows):
        bad = int(index.min()) if int(index.min()) < 0 else int(index.max())
        raise IndexError(f"index holds {bad}, but table has rows 0 to {rows - 1}")
    out = torch.empty((index.numel(), width), dtype=table.dtype, device=table.device)
    if out.numel():
        gather_kernel[(index.numel(), cdiv(width, block))](table, index, out, width, table.stride(0), BLOCK=block)
    return out


def gather_traffic(n: int, width: int, element_size: int, block: int = BLOCK) -> Traffic:
    """Traffic of :func:`gather`: each program reads its int64 index, then its part of a row."""
    nbytes = size("n", n) * size("width", width) * size("element_size", element_size, 1)
    return Traffic(nbytes + n * cdiv(width, block) * 8, nbytes)
