"""Marks uninitialized memory: the value that ``torch.empty`` leaves during a check.

Fresh memory usually holds zeros or an old right answer, so a kernel that forgets its last tile passes by luck. During
a check fresh memory is filled with one NaN of a recognisable bit pattern; an output that still holds it was never
written (or was computed from memory that was never written).
"""

from __future__ import annotations

import torch

# quiet NaNs with a payload; 0/0 and inf - inf have another
_BITS = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FDA),
    torch.float32: (torch.int32, 0x7FDA5A5A),
    torch.float64: (torch.int64, 0x7FFDA5A5A5A5A5A5),
    torch.int16: (torch.int16, -23131),
    torch.int32: (torch.int32, -1515870811),
    torch.int64: (torch.int64, -6510615555426900571),
}


def mark(tensor: torch.Tensor) -> None:
    """Fill freshly allocated memory with the value that means "never written"; other dtypes are left as they are."""
    if tensor.dtype in _BITS and tensor.numel() and tensor.layout is torch.strided:
        integer, bits = _BITS[tensor.dtype]
        tensor.view(integer).fill_(bits)


def uninitialized(tensor: torch.Tensor) -> torch.Tensor:
    """Where a tensor still holds the value of :func:`mark`: bool, same shape."""
    if tensor.dtype not in _BITS:
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    integer, bits = _BITS[tensor.dtype]
    return tensor.detach().view(integer) == bits
