"""What fusing saves: a sum and its ReLU as two kernels and as one, and chains of multiply-adds of any length."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.example_kernels.elementwise import BLOCK
from utils.example_kernels.traffic import Traffic, cdiv, same_dtype, size, tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip

#: A link of the chain is x * SCALE + SHIFT: it leaves 1 where it is and pulls everything else towards it.
SCALE, SHIFT = 0.875, 0.125


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offsets, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def relu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offsets, tl.where(x < 0, 0.0, x).to(out_ptr.dtype.element_ty), mask=mask)  # a NaN stays one


@triton.jit
def add_relu_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offsets, mask=mask)  # (BLOCK,)
    z = x + y  # never leaves the registers
    tl.store(out_ptr + offsets, tl.where(z < 0, 0.0, z).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def chain_kernel(x_ptr, out_ptr, n, scale, shift, LINKS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # (BLOCK,), stays in registers for every link
    for _ in tl.static_range(LINKS):
        x = x * scale + shift  # one fused multiply-add: 2 FLOPs
    tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gelu_tanh_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # (BLOCK,)
    inner = 0.7978845608 * (x + 0.044715 * x * x * x)
    y = x * tl.sigmoid(2.0 * inner)  # 0.5 x (1 + tanh(u)) = x sigmoid(2u)
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


def _pair(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    tensor("x", x, 1)
    tensor("y", y, 1)
    same_dtype(x=x, y=y)
    if x.shape != y.shape:
        raise ValueError(f"y must have x's shape {tuple(x.shape)}, got {tuple(y.shape)}")
    _contiguous(x=x, y=y)
    return torch.empty_like(x)


def _contiguous(**tensors: torch.Tensor) -> None:
    for name, value in tensors.items():
        if not value.is_contiguous():
            raise ValueError(f"{name} must have stride 1, got {value.stride(0)}")


def add(x: torch.Tensor, y: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Sum of two vectors (n,) of one dtype.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device, stride or length.
    """
    out = _pair(x, y)
    if x.numel():
        add_kernel[(cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out


def relu(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """max(x, 0) of a vector (n,); a NaN stays a NaN.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device or stride.
    """
    _contiguous(x=tensor("x", x, 1))
    out = torch.empty_like(x)
    if x.numel():
        relu_kernel[(cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out


def add_relu(x: torch.Tensor, y: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """ReLU of the sum of two vectors (n,), as one kernel: the sum stays in registers.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device, stride or length.
    """
    out = _pair(x, y)
    if x.numel():
        add_relu_kernel[(cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out


def chain(x: torch.Tensor, links: int, block: int = BLOCK) -> torch.Tensor:
    """``links`` multiply-adds, ``x * SCALE + SHIFT`` again and again, in one kernel and in fp32, on a vector (n,).

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device or stride, or ``links`` is not a positive integer.
    """
    _contiguous(x=tensor("x", x, 1))
    size("links", links, 1)
    out = torch.empty_like(x)
    if x.numel():
        chain_kernel[(cdiv(x.numel(), block),)](x, out, x.numel(), SCALE, SHIFT, LINKS=links, BLOCK=block)
    return out


def gelu_tanh(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """GeLU of a vector (n,) in its tanh form (Hendrycks and Gimpel 2016, section 2), computed in fp32.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device or stride.
    """
    _contiguous(x=tensor("x", x, 1))
    out = torch.empty_like(x)
    if x.numel():
        gelu_tanh_kernel[(cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out


def add_relu_traffic(n: int, element_size: int, fused: bool = True) -> Traffic:
    """Traffic of :func:`add_relu`, or of :func:`add` and then :func:`relu`: 3 accesses an element, or 5."""
    nbytes = size("n", n) * size("element_size", element_size, 1)
    return Traffic(2 * nbytes, nbytes) if fused else Traffic(3 * nbytes, 2 * nbytes)


def chain_traffic(n: int, element_size: int) -> Traffic:
    """Traffic of :func:`chain`, however long: each element once in, once out."""
    nbytes = size("n", n) * size("element_size", element_size, 1)
    return Traffic(nbytes, nbytes)
