"""Three stacked sigmoids, forward and backward, twice: with the inner values kept in memory, and with none kept.

y = s(s2), s2 = s(s1), s1 = s(x), and s'(z) = s(z) (1 - s(z)), so dx = dy y (1 - y) s2 (1 - s2) s1 (1 - s1).
"""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)
from utils.example_kernels.elementwise import BLOCK
from utils.example_kernels.traffic import Traffic, cdiv, same_dtype, size, tensor

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def sigmoids_forward_kernel(x_ptr, s1_ptr, s2_ptr, y_ptr, n, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)  # (BLOCK,)
    s1 = tl.sigmoid(x.to(tl.float32))
    s2 = tl.sigmoid(s1)
    if KEEP:
        tl.store(s1_ptr + offsets, s1.to(x.dtype), mask=mask)
        tl.store(s2_ptr + offsets, s2.to(x.dtype), mask=mask)
    tl.store(y_ptr + offsets, tl.sigmoid(s2).to(x.dtype), mask=mask)


@triton.jit
def sigmoids_backward_kept_kernel(dy_ptr, s1_ptr, s2_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0)  # (BLOCK,)
    s1 = tl.load(s1_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # (BLOCK,)
    s2 = tl.load(s2_ptr + offsets, mask=mask, other=0.0).to(tl.float32)  # (BLOCK,)
    y = tl.sigmoid(s2)  # cheaper than reading it
    dx = dy.to(tl.float32) * y * (1 - y) * s2 * (1 - s2) * s1 * (1 - s1)
    tl.store(dx_ptr + offsets, dx.to(dy.dtype), mask=mask)


@triton.jit
def sigmoids_backward_kernel(dy_ptr, x_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0)  # (BLOCK,)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)  # (BLOCK,)
    s1 = tl.sigmoid(x.to(tl.float32))  # the forward pass once more
    s2 = tl.sigmoid(s1)
    y = tl.sigmoid(s2)
    dx = dy.to(tl.float32) * y * (1 - y) * s2 * (1 - s2) * s1 * (1 - s1)
    tl.store(dx_ptr + offsets, dx.to(dy.dtype), mask=mask)


def _checked(**vectors: torch.Tensor) -> torch.Tensor:
    """An output like the vectors, which must be (n,), of one dtype and contiguous."""
    shape = next(iter(vectors.values())).shape
    for name, value in vectors.items():
        tensor(name, value, 1)
        if value.shape != shape or not value.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, of shape {tuple(shape)}; got {tuple(value.shape)}, {value.stride()}"
            )
    same_dtype(**vectors)
    return torch.empty_like(next(iter(vectors.values())))


def sigmoids_forward(x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """s(s(s(x))) of a vector (n,); nothing else is written.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device or stride.
    """
    y = _checked(x=x)
    if x.numel():
        sigmoids_forward_kernel[(cdiv(x.numel(), block),)](x, y, y, y, x.numel(), KEEP=False, BLOCK=block)
    return y


def sigmoids_forward_kept(x: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, s1, s2) of a vector (n,): the output and the two inner values, all written to memory.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device or stride.
    """
    y, s1, s2 = _checked(x=x), torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        sigmoids_forward_kernel[(cdiv(x.numel(), block),)](x, s1, s2, y, x.numel(), KEEP=True, BLOCK=block)
    return y, s1, s2


def sigmoids_backward_kept(dy: torch.Tensor, s1: torch.Tensor, s2: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Gradient (n,) of x from that of y and the inner values that the forward pass kept.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device, stride or length.
    """
    dx = _checked(dy=dy, s1=s1, s2=s2)
    if dy.numel():
        sigmoids_backward_kept_kernel[(cdiv(dy.numel(), block),)](dy, s1, s2, dx, dy.numel(), BLOCK=block)
    return dx


def sigmoids_backward(dy: torch.Tensor, x: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Gradient (n,) of x from that of y and x itself: the inner values are computed again, in registers.

    Raises:
        TypeError, ValueError: Wrong dtype, rank, device, stride or length.
    """
    dx = _checked(dy=dy, x=x)
    if dy.numel():
        sigmoids_backward_kernel[(cdiv(dy.numel(), block),)](dy, x, dx, dy.numel(), BLOCK=block)
    return dx


def sigmoids_traffic(n: int, element_size: int, kept: bool) -> Traffic:
    """Traffic of forward and backward pass together: 8 accesses an element with the inner values kept, else 5."""
    nbytes = size("n", n) * size("element_size", element_size, 1)
    forward = Traffic(nbytes, 3 * nbytes) if kept else Traffic(nbytes, nbytes)
    backward = Traffic(3 * nbytes, nbytes) if kept else Traffic(2 * nbytes, nbytes)
    return forward + backward
