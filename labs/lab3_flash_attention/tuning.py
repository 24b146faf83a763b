"""Every number that tunes a kernel of this lab, in one place, with the measurement that chose it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils import runtime


class Tile(NamedTuple):
    """Queries and keys of a tile of scores, warps of a program, and stages of software pipelining.

    ``descriptors``: tiles come through tensor descriptors, where the tensors' strides allow. ``registers``: that a
    thread may take; by default as many as the compiler wants.
    """

    m: int
    n: int
    warps: int
    stages: int
    descriptors: bool = False
    registers: int | None = None


#: Bytes of keys and values that programs running at the same time may share in the L2 cache.
L2_BYTES = 32 * 2**20


def block_d(head_dim: int) -> int:
    """Columns of a tile of q, k or v: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for the interpreter."""
    return (0, 0) if runtime.INTERPRET else torch.cuda.get_device_capability(device)


def forward(head_dim: int, dtype: torch.dtype, causal: bool, capability: tuple[int, int]) -> Tile:
    """Tile of the forward kernel: a program owns ``m`` queries and takes ``n`` keys at a time."""
    if runtime.INTERPRET:
        return Tile(32, 16, 4, 1)
    width = block_d(head_dim)
    if dtype == torch.float32:
        return Tile(32, 32, 4, 2) if width <= 64 else Tile(16, 32, 4, 2) if width <= 128 else Tile(16, 16, 4, 1)
    if capability[0] >= 9:
        if width <= 64:
            return Tile(128, 64, 4, 3, True) if causal else Tile(64, 128, 4, 2, True)
        return Tile(128, 64, 4, 2, True) if width == 128 else Tile(128, 64, 8, 2, True)
    if width <= 64:
        return Tile(128, 64, 4, 3) if causal else Tile(64, 128, 4, 2)
    return Tile(128, 64, 8, 2) if width == 128 else Tile(64, 32, 8, 2)


def dkdv(head_dim: int, dtype: torch.dtype, causal: bool, capability: tuple[int, int]) -> Tile:
    """Tile of the kernel of dK and dV: a program owns ``n`` keys and takes ``m`` queries at a time."""
    if runtime.INTERPRET:
        return Tile(16, 32, 4, 1)
    width = block_d(head_dim)
    if dtype == torch.float32:
        return Tile(32, 32, 8, 1) if width <= 64 else Tile(16, 16, 4, 1)
    if capability[0] >= 9:
        warps = 8 if capability[0] > 9 and width == 128 else 4
        return Tile(64, 64, warps, 2, True) if width <= 128 else Tile(32, 64, 8, 1, True)
    if width <= 64:
        return Tile(64, 32, 4, 2)
    return Tile(64, 64, 8, 2) if width == 128 else Tile(32, 64, 8, 1)


def dq(head_dim: int, dtype: torch.dtype, causal: bool, capability: tuple[int, int]) -> Tile:
    """Tile of the kernel of dQ: a program owns ``m`` queries and takes ``n`` keys at a time."""
    if runtime.INTERPRET:
        return Tile(32, 16, 4, 1)
    width = block_d(head_dim)
    if dtype == torch.float32:
        return Tile(32, 32, 8, 1) if width <= 64 else Tile(16, 16, 8, 1)
    if capability[0] >= 9:
        return Tile(64, 64, 4, 2, True) if width <= 128 else Tile(64, 64, 8, 1, True)
    if width <= 64:
        return Tile(64, 32, 4, 2)
    return Tile(64, 64, 8, 2) if width == 128 else Tile(64, 32, 8, 1)


def delta_rows(head_dim: int) -> int:
    """Rows that a program of the delta kernel takes."""
    return runtime.pick(cpu=16, gpu=max(1, 8192 // block_d(head_dim)))


def heads_together(bytes_per_head: int) -> int:
    """Heads whose programs run side by side: as many as the L2 cache holds the operands of."""
    return max(1, min(L2_BYTES // max(1, bytes_per_head), 1 << 16))
