"""Every number that tunes a kernel of this lab, in one place, with the measurement that chose it.

On one H100 (Triton 3.6, PyTorch 2.11), bf16, 16,384 tokens and a hidden size of 2048, as medians of interleaved rounds
on a warm card that is kept busy, in milliseconds. Full and causal attention over 8192 tokens, for tiles of m queries x
n keys, warps, stages. Laps were short and clocks high; ``benchmarks/attention_speed.py`` records what the numbers that
were chosen reach in a long computation. float16 takes the same. A row that outgrows its anchor is computed again with
the anchored loop's tile; without that loop a head_dim of 128 keeps the tile, though another is faster by 2 to 3 %.
Triton 3.6 and 3.7 do not compile the anchored loop for sm_100 if its products are of 16 bits. An A100, which has
no descriptors, takes the last lines of each function, and so does every GPU that no line names.

================  =============================================================================================
kernel, head_dim  tile: full, causal
================  =============================================================================================
forward, 128      anchored: 128x64, 4, 2: 1.61, 0.88   64x64, 4, 2: 2.20, 1.14   128x128, 8, 2: 2.34, 1.13
                  running maximum: 128x64, 4, 2: 2.24, 1.10   64x128, 4, 1: 2.19, 1.07   64x64, 4, 3: 2.34, 1.14
forward, 64       anchored: 64x64, 4, 2, 128 registers: 2.27   128x64, 4, 2, 168 registers: 2.30   64x128, 4, 2: 2.48
                  running maximum: 64x128, 4, 2: 2.52   64x64, 4, 3: 2.99   128x64, 4, 3: 2.83
dkdv, 128         loads first: 64x64, 4, 2: 3.44, 1.93   without masks: 3.61, 1.81
                  loads last: 64x64, 4, 2: 3.67, 1.92   32x64, 4, 3: 4.18   8 warps, or 128 keys: 4.6, 2.1
dkdv, 64          loads first: 64x64, 4, 2: 4.20, 2.56   without masks: 3.96, 2.42
                  loads last: 64x64, 4, 3: 4.11, 2.04   without masks: 4.22
dq, 128           128x64, 8, 3: 2.68, 1.40   64x64, 4, 2: 2.75, 1.42   128x128, 8, 2: 3.00   128x64, 8, 2: 3.53
dq, 64            128x64, 4, 3: 2.75   64x64, 4, 3: 1.52 causal   128x64, 4, 2: 3.03   64x128, 4, 2: 3.5
================  =============================================================================================

Tensors that descriptors cannot describe (a head_dim of 60 or 100, whose rows do not start at multiples of 16 bytes, or
a last stride that is not 1) come through pointers, and these take registers that larger tiles do not leave. Two
sequences of 4096 tokens with 32, 16 and 8 heads of 60, 100 and 180, full and causal:

================  =============================================================================================
kernel, head_dim  tile: full, causal
================  =============================================================================================
forward, 60       128x64, 4, 3: 1.46, 0.81   64x64, 4, 3: 1.58, 0.94   64x128, 4, 2: 2.24, 1.37   anchored: 1.55, 0.98
forward, 100      128x64, 8, 2: 1.30, 0.68   64x64, 4, 2: 2.07, 1.33   anchored: 1.33, 0.91
forward, 180      128x32, 8, 2: 2.27, 1.12   64x32, 8, 2: 2.46, 1.40   64x64, 8, 2: 3.09, 1.69
dkdv, 60          64x64, 4, 1: 1.92, 1.01   64x64, 4, 3: 2.30, 1.21   32x64, 4, 2: 2.32, 1.50   64x32, 4, 2: 4.47, 2.38
dkdv, 100         64x64, 8, 2: 3.22, 1.79   32x64, 4, 2: 3.79, 1.66   64x64, 4, 1: 8.26, 4.15
dkdv, 180         32x32, 8, 1: 6.62, 3.56   32x64, 8, 1: 8.59, 2.64   64x64, 8, 1: 13.3, 5.15
dq, 60            64x64, 4, 3: 1.40, 0.89   128x64, 4, 2: 1.45, 0.87   64x32, 4, 2: 1.59, 0.91
dq, 100           128x64, 8, 2: 1.33, 0.66   128x32, 8, 2: 1.45, 0.85   64x64, 8, 2: 2.51, 1.30
dq, 180           128x32, 8, 1: 2.12, 1.16   64x32, 8, 1: 6.81, 1.49   64x64, 8, 1: 11.8, 2.34
================  =============================================================================================

Of 2048 tokens, causal, dq for a head_dim of 64 takes 0.394 with 64x64, 4, 3 and 0.414 with 128x64, 4, 3.

Heads whose programs run side by side share the L2 cache, and fewer than it holds are best: with four times the rows
of ``L2_GROUP_ROWS`` the anchored forward pass of 2048 tokens, full, takes 8 % more time. dkdv with a head_dim of 128
takes 0.93 of 2048 tokens and 3.38 of 8192 with 8192 rows of queries, 0.94 and 3.44 with 16,384, 1.00 and 3.48 with
65,536. Causal programs differ in length; more heads at hand even that out.

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

What else was tried. Anchored, but with keys and values of the same tile in a step: 1.86 full and 0.98 causal with a
head_dim of 128 (1.61, 0.88); a running maximum with the products in the anchored loop's order: 2.62, 1.37, since the
rescaling stands between them. Rescaling only where a maximum grew by more than 2^8: 3 to 9 % more (a vote of all warps,
and spills). q kept in registers: up to 15 % more. In dkdv, both products of a tile before the exponentials and dV
behind dS: 5 to 13 % less time than in the order of the formulas; k or v kept in registers: 6 to 48 % more; L and delta
through descriptors: 25 to 35 % more. In dq, dP before the exponentials: 8 to 14 % less; q and dO kept in registers: 10
to 60 % more; keys loaded twice, so that products follow one another: 40 % more. Descriptors instead of pointers: up to
13 % less.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils import runtime


class Tile(NamedTuple):
    """Queries and keys of a tile of scores, warps of a program, and stages of software pipelining.

    ``descriptors``: tiles come through tensor descriptors, where the tensors' strides allow. ``registers``: that a
    thread may take; by default as many as the compiler wants. ``anchored``, of the forward kernel: the maximum of a
    row's first tile serves for the whole row. Of the kernel of dK and dV, ``loads_first``: the next tile's loads are
    issued before the gradients are multiplied; ``masked``: L and delta are loaded with a mask even where no row is
    missing.
    """

    m: int
    n: int
    warps: int
    stages: int
    descriptors: bool = False
    registers: int | None = None
    anchored: bool = False
    loads_first: bool = False
    masked: bool = True


#: Rows of the heads that programs running at the same time share in the L2 cache: without a mask, and causal.
L2_GROUP_ROWS = {"forward": (16384, 32768), "dkdv": (8192, 65536), "dq": (16384, 16384)}


#: Keys from which on a row is anchored. Not measured: fewer are a tile or two, and have no maxima to save.
ANCHORED_FROM = 129


def block_d(head_dim: int) -> int:
    """Columns of a tile of q, k or v: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for the interpreter."""
    return (0, 0) if runtime.INTERPRET else torch.cuda.get_device_capability(device)


def forward(
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    capability: tuple[int, int],
    described: bool = True,
    anchored: bool = True,
) -> Tile:
    """Tile of the forward kernel: a program owns ``m`` queries and takes ``n`` keys at a time.

    ``described``: whether the tensors may have descriptors. ``anchored``: whether there is an anchored loop, so that a
    tile may ask for it.
    """
    if runtime.INTERPRET:
        return Tile(32, 16, 4, 1)
    width = block_d(head_dim)
    if dtype == torch.float32:
        return Tile(32, 32, 4, 2) if width <= 128 else Tile(16, 16, 4, 1)
    hopper = capability[0] == 9
    if capability[0] >= 9 and described:
        anchored = anchored and hopper
        if width <= 64:
            return Tile(64, 64, 4, 2, True, 128, True) if anchored else Tile(64, 128, 4, 2, True)
        return Tile(128, 64, 4 if width == 128 else 8, 2, True, anchored=anchored)
    if width <= 64:
        return Tile(128, 64, 4, 3) if causal or hopper else Tile(64, 128, 4, 2)
    return Tile(128, 64, 8, 2) if width == 128 else Tile(128 if hopper else 64, 32, 8, 2)


def dkdv(head_dim: int, dtype: torch.dtype, causal: bool, capability: tuple[int, int], described: bool = True) -> Tile:
    """Tile of the kernel of dK and dV: a program owns ``n`` keys and takes ``m`` queries at a time.

    ``described``: whether the tensors may have descriptors.
    """
    if runtime.INTERPRET:
        return Tile(16, 32, 4, 1)
    width = block_d(head_dim)
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1) if width <= 64 else Tile(32, 32, 8, 1) if width == 128 else Tile(16, 32, 8, 1)
    hopper = capability[0] == 9
    if capability[0] >= 9 and described:
        if width <= 64:
            early = hopper and not causal
            return Tile(64, 64, 4, 2 if early else 3, True, loads_first=early, masked=not early)
        if width == 128:
            return Tile(64, 64, 4 if hopper else 8, 2, True, loads_first=hopper, masked=not (hopper and causal))
        return Tile(64, 64, 8, 1, True) if hopper else Tile(32, 64, 8, 1, True)
    if width <= 64:
        return Tile(64, 64, 4, 1) if hopper else Tile(64, 32, 4, 2)
    if width == 128:
        return Tile(32, 64, 4, 2) if hopper and causal else Tile(64, 64, 8, 2)
    return Tile(32, 32 if hopper and not causal else 64, 8, 1)


def dq(head_dim: int, dtype: torch.dtype, causal: bool, capability: tuple[int, int], described: bool = True) -> Tile:
    """Tile of the kernel of dQ: a program owns ``m`` queries and takes ``n`` keys at a time.

    ``described``: whether the tensors may have descriptors.
    """
    if runtime.INTERPRET:
        return Tile(32, 16, 4, 1)
    width = block_d(head_dim)
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1) if width <= 64 else Tile(32, 32, 8, 1) if width == 128 else Tile(16, 32, 8, 1)
    hopper = capability[0] == 9
    if capability[0] >= 9 and described:
        if width <= 64:
            return Tile(64, 64, 4, 3, True) if causal else Tile(128, 64, 4, 3, True)
        return Tile(128, 64, 8, 3, True) if width == 128 else Tile(128, 32, 8, 1, True)
    if width <= 64:
        return Tile(64, 64, 4, 3) if hopper else Tile(64, 32, 4, 2)
    if width == 128:
        return Tile(128 if hopper else 64, 64, 8, 2)
    return Tile(128 if hopper else 64, 32, 8, 1)


def delta_rows(head_dim: int) -> int:
    """Rows that a program of the delta kernel takes."""
    return runtime.pick(cpu=16, gpu=max(1, 8192 // block_d(head_dim)))


def nheads_in_l2(kernel: str, rows: int, causal: bool) -> int:
    """Heads whose programs run side by side, so that they find each other's operands in the L2 cache.

    Args:
        kernel: ``forward``, ``dkdv`` or ``dq``.
        rows: That programs of one head share: keys, or for ``dkdv`` queries of all heads of the group.
        causal: Programs are of different lengths then, and more of them must be at hand.
    """
    return max(1, L2_GROUP_ROWS[kernel][causal] // max(1, rows))
