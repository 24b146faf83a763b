"""What ``multiply`` takes, and the descriptors by which TMA knows its tensors."""

from __future__ import annotations

import torch

from utils import runtime  # noqa: F401  (before triton: it decides between GPU and interpreter)

from triton.experimental.gluon import language as gl  # isort: skip
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # isort: skip


def check_arguments(a: torch.Tensor, b: torch.Tensor, stages: int) -> None:
    """Refuse what the kernel cannot take.

    Raises:
        TypeError: another dtype than bfloat16.
        ValueError: shapes, strides or devices that do not go together, a GPU that is no Hopper, or another ring.
    """
    if stages not in (2, 3, 4):
        raise ValueError(f"stages must be 2, 3 or 4, got {stages!r}")
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        raise TypeError(f"a and b must be bfloat16, got {a.dtype} and {b.dtype}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or not a.numel() or not b.numel():
        raise ValueError(
            f"a must be (M, K) and b (N, K), none of them empty, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.shape[1] % 8 or b.shape[0] % 8:
        raise ValueError(f"K and N must be multiples of 8, got K = {a.shape[1]} and N = {b.shape[0]}")
    if not all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (a, b)) or a.device != b.device:
        raise ValueError("a and b must be contiguous, on one device, and begin at a multiple of 16 bytes")
    if a.is_cuda and torch.cuda.get_device_capability(a.device) != (9, 0):
        raise ValueError(f"the kernel is for Hopper GPUs, not for {torch.cuda.get_device_name(a.device)}")


def descriptor_of(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What TMA must know of a matrix to hand out tiles (rows, columns) of it; what lies beyond its edges reads as 0."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)
