"""Every number that tunes a kernel of this lab, in one place, with the measurement that chose it.

On one H100 (Triton 3.6, PyTorch 2.11), bf16, 16,384 tokens and a hidden size of 2048, as medians of interleaved rounds
on a warm card that is kept busy, in milliseconds. Full and causal attention over 8192 tokens, for tiles of m queries x
n keys, warps, stages. ``benchmarks/attention_speed.py`` records what the chosen numbers reach. float16 takes the same.

================  =============================================================================================
kernel, head_dim  tile: full, causal
================  =============================================================================================
forward, 128      128x64, 4, 2: 2.04, 1.08   64x128, 4, 1: 2.12, 1.07   64x64, 4, 3: 2.17, 1.06
forward, 64       64x128, 4, 2: 2.45, 1.22   64x64, 4, 3: 2.56, 1.29   128x64, 4, 3: 2.63, 1.31
dkdv, 128         64x64, 4, 2: 3.48, 1.69    8 warps, or 128 keys: 4.6, 2.1
dkdv, 64          64x64, 4, 3: 3.76, 1.88    64x64, 4, 2: 3.87, 1.91
dq, 128           128x64, 8, 3: 2.53, 1.28   64x64, 4, 2: 2.77, 1.37   128x64, 8, 2: 3.54, 1.63
dq, 64            128x64, 4, 3: 2.57, 1.34   64x64, 4, 3: 2.64, 1.35   64x64, 4, 2: 2.63, 1.34
================  =============================================================================================

Of 2048 tokens, causal, dq for a head_dim of 64 takes 0.394 with 64x64, 4, 3 and 0.414 with 128x64, 4, 3.

A head_dim of 256, 16 heads in all over 4096 tokens: forward 128x64, 8, 2: 0.52 full, 64x64, 4, 1: 0.58. dkdv 64x64, 8,
1: 2.39 full, 1.24 causal, though it spills (32x64 does not, or hardly: 3.22, 1.49). dq 128x32, 8, 1: 1.32, 0.66
(64x64, 8, 2: 1.51, 0.84).

float32, 8 heads over 2048 tokens, full, causal:

================  =============================================================================================
kernel, head_dim  tile
================  =============================================================================================
forward, 64       32x32, 4, 2: 0.83, 0.53   32x64, 4, 2: 0.75, 0.49, which spills with some compilers
forward, 128      32x32, 4, 2: 1.83, 0.74, though it may spill   16x32, 4, 2: 2.63, 1.34   32x32, 8, 1: 2.69, 1.35
dkdv, 64          32x32, 4, 1: 1.49, 1.00   64x32, 8, 1: 1.54, 0.82   32x32, 8, 1: 2.60, 1.60
dkdv, 128         32x32, 8, 1: 5.06, 2.59   16x16, 4, 1: 5.48, 2.68   16x16, 8, 1: 9.76, 4.80
dkdv, 256         16x32, 8, 1: 10.9, 5.32   16x16, 4, 1: 10.6, 5.40, which spills   16x16, 8, 1: 20.1, 9.71
dq, 64            32x32, 4, 1: 1.36, 0.93   64x32, 8, 1: 1.34, 1.02   32x32, 8, 1: 2.45, 1.67
dq, 128           32x32, 8, 1: 4.82, 2.45   16x16, 4, 1: 5.18, 2.75   16x16, 8, 1: 9.48, 4.80
dq, 256           16x32, 8, 1: 10.3, 5.14   16x16, 8, 1: 18.8, 9.37
================  =============================================================================================

What else was tried. In dkdv, both products of a tile before the exponentials and dV behind dS: 5 to 13 % less time than
in the order of the formulas; in dq, dP before the exponentials: 8 to 14 % less. Descriptors instead of pointers: up to
13 % less. In the forward kernel, rescaling only where a maximum grew by more than 2^8 costs 3 to 9 % (a vote of all
warps, and spills), q kept in registers up to 15 %; k or v kept in registers in dkdv costs 6 to 48 %.
"""

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
        return Tile(32, 32, 4, 2) if width <= 128 else Tile(16, 16, 4, 1)
    if capability[0] >= 9:
        if width <= 64:
            return Tile(64, 128, 4, 2, True)
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
        return Tile(32, 32, 4, 1) if width <= 64 else Tile(32, 32, 8, 1) if width == 128 else Tile(16, 32, 8, 1)
    if capability[0] >= 9:
        warps = 8 if capability[0] > 9 and width == 128 else 4
        stages = 3 if width <= 64 else 2
        if width <= 128:
            return Tile(64, 64, warps, stages, True)
        return Tile(64, 64, 8, 1, True) if capability[0] == 9 else Tile(32, 64, 8, 1, True)
    if width <= 64:
        return Tile(64, 32, 4, 2)
    return Tile(64, 64, 8, 2) if width == 128 else Tile(32, 64, 8, 1)


def dq(head_dim: int, dtype: torch.dtype, causal: bool, capability: tuple[int, int]) -> Tile:
    """Tile of the kernel of dQ: a program owns ``m`` queries and takes ``n`` keys at a time."""
    if runtime.INTERPRET:
        return Tile(32, 16, 4, 1)
    width = block_d(head_dim)
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1) if width <= 64 else Tile(32, 32, 8, 1) if width == 128 else Tile(16, 32, 8, 1)
    if capability[0] >= 9:
        if width <= 64:
            return Tile(64, 64, 4, 3, True) if causal else Tile(128, 64, 4, 3, True)
        return Tile(128, 64, 8, 3, True) if width == 128 else Tile(128, 32, 8, 1, True)
    if width <= 64:
        return Tile(64, 32, 4, 2)
    return Tile(64, 64, 8, 2) if width == 128 else Tile(64, 32, 8, 1)


def delta_rows(head_dim: int) -> int:
    """Rows that a program of the delta kernel takes."""
    return runtime.pick(cpu=16, gpu=max(1, 8192 // block_d(head_dim)))


def heads_together(bytes_per_head: int) -> int:
    """Heads whose programs run side by side: as many as the L2 cache holds the operands of."""
    return max(1, min(L2_BYTES // max(1, bytes_per_head), 1 << 16))
