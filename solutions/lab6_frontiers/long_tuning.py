"""Every number that tunes the kernels for long sequences.

Attention's on Hopper were chosen from trials of the same loops on one H200, in bf16 with 16 heads over 16,384 tokens,
medians of interleaved rounds in milliseconds. Windows of 256, 1024 and 4096; documents are causal, of 16 tokens to
several thousand (A) and of about 200 (B). Tiles are m queries x n keys, warps, stages:

=====================  ================================================================================================
kernel, head_dim 128   256, 1024 and 4096, A, B
=====================  ================================================================================================
forward, pointers      128x64, 8, 2: 0.219, 0.423, 1.158, 0.449, 0.223
forward, anchored      64x64, 4, 2: 0.157, 0.301, 0.891, 0.332, 0.192   128x64, 4, 2: 0.159, 0.316, 0.859, 0.297, 0.175
dq, pointers           128x64, 8, 2: 0.256, 0.511, 1.427, 0.549, 0.288
dq, descriptors        64x64, 4, 2: 0.173, 0.385, 1.155, 0.432, 0.195   128x64, 8, 3: 0.218, 0.422, 1.228, 0.395, 0.240
dkdv, pointers         32x64, 8, 1: 0.625, 1.858, 5.805, 1.521, 0.468
dkdv, loads first      64x64, 4, 2: 0.222, 0.486, 1.487, 0.437, 0.238   without masks: 0.210, 0.457, 1.401, 0.418, 0.230
=====================  ================================================================================================

On 2026-11-30, with Triton 3.6, the finished kernels ran beside these changes, in CUDA graphs: microseconds, and behind
a colon the rate on the tiles that they compute, of lab 3's. C is causal, five documents of 2,303 to 4,096 tokens.

====================================================  ============  ============  ============
kernel, head_dim                                      window 1024   window 4096   C
====================================================  ============  ============  ============
forward, 128: 64x64, 4, 2                             325: 0.67     942: 0.84     525: 0.68
forward, 128: 128x64, 4, 2                            299: 0.78     825: 0.97     445: 0.82
forward, 64: 64x64, 4, 2, the last step by itself     174: 0.81     514: 0.96     267: 0.88
forward, 64: the last step within the loop            161: 0.87     480: 1.03     269: 0.87
dkdv, 64: 64x64, 4, 3                                 407: 0.65     1266: 0.73    717: 0.62
dkdv, 64: 168 registers, L and delta aligned          301: 0.88     962: 0.96     452: 0.98
dkdv, 128: 64x64, 4, 2                                540: 0.82     1711: 0.91    795: 0.93
dkdv, 128: L and delta aligned                        539: 0.82     1707: 0.92    777: 0.95
====================================================  ============  ============  ============

So the forward pass takes 128x64 with a head_dim of 128, although the compiler then keeps 16 to 80 bytes of a thread in
memory. A tile of 128 queries meets (w + 128) / (w + 64) times as many keys of a window w as two tiles of 64, and at a
window of about 350 that takes what the larger tile gains, 16 %. Of documents of 200 tokens it computes a fifth more
pairs. These keep 64x64; in an earlier form of the loop (B, above) they took 9 % less with 128x64, which was not
measured again. With 168 registers three programs of dkdv fit an SM, not two; where L is loaded without masks and
aligned, its loop over queries keeps all numbers in registers. dq is as it was. The other tiles, and those of other GPUs
and of MLA, follow from registers and shared memory, by the compiler's word (``tests/test_lab6_long_compile.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from solutions.lab3_flash_attention import tuning as lab3
from utils import runtime

from .tuning import power_of_two

#: Tokens of a part of a context, at least, and parts of a context, at most.
SHORTEST_PART = runtime.pick(cpu=16, gpu=256)
MOST_PARTS = 64
#: One part is enough where the programs fill this share of the multiprocessors' waves.
FULL_WAVE = 0.9


class LatentTile(NamedTuple):
    """Heads and cached tokens of a tile of scores, warps of a program, and stages of software pipelining."""

    m: int
    n: int
    warps: int
    stages: int


def mla_decode(heads: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> LatentTile:
    """Tile of the decode kernel over latents of 512 numbers.

    The sums of 64 heads take 128 registers of each of 256 threads; on Hopper tiles of 64 tokens would spill beside
    them. Fewer heads than 64 fill no tile of its tensor cores, and go to the instructions of Ampere.

    Args:
        heads: query heads.
        dtype: of the latents; float32 is multiplied without tensor cores.
        capability: of the GPU; None in the interpreter.
    """
    m = max(16, power_of_two(heads))
    if capability is None:
        return LatentTile(16, 16, 4, 1)
    if dtype == torch.float32:
        return LatentTile(16, 16, 8, 1)
    if capability[0] == 9 and m >= 64:
        return LatentTile(64, 32, 8, 2)
    return LatentTile(min(32, m), 32, 8, 2)


def mla_splits(rows: int, longest: int, sms: int) -> int:
    """Parts of every context, so that programs run in full waves: a multiprocessor has room for one.

    The time of a wave is counted in tokens: ``longest / parts``, and if contexts are split :data:`SHORTEST_PART` more,
    for the beginning of a part's program, the store of its output and its share of the merge. This is about what an
    H200 took for 128 rows of 8,192 tokens with an earlier version of the kernel: 0.275 ms in one part, and 0.288 ms in
    two, whose 256 programs run in two waves. Of equal times, that of the fewest parts is taken.

    Args:
        rows: sequences times blocks of heads: programs if nothing is split.
        longest: the most tokens that a context may have.
        sms: multiprocessors.
    """
    rows = max(1, rows)
    if rows >= FULL_WAVE * sms * _waves(rows, sms):
        return 1
    most = max(1, min(longest // SHORTEST_PART, MOST_PARTS))
    return min(range(1, most + 1), key=lambda parts: _time_in_tokens(rows, longest, parts, sms))


def _waves(programs: int, sms: int) -> int:
    """How many programs run one after another on the busiest multiprocessor."""
    return -(-programs // sms)


def _time_in_tokens(rows: int, longest: int, parts: int, sms: int) -> float:
    """Time of all programs, in that of one token of a program."""
    beside = SHORTEST_PART if parts > 1 else 0
    return _waves(rows * parts, sms) * (longest / parts + beside)


def merge(parts: int, width: int) -> LatentTile:
    """Tile of the merge: ``n`` parts of one row at a time, of ``width`` numbers."""
    return LatentTile(1, min(4096 // width, max(2, power_of_two(parts))), 4, 1)


#: Kernel, columns of a tile and whether they are float32 -> a tile, where lab 3's would spill beside what a window and
#: documents need; a fourth is the generation of GPUs (8 is Ampere, 9 Hopper, 10 Blackwell) where it is one only.
SMALLER = {
    ("forward", 64, False, 8): lab3.Tile(64, 64, 4, 3),
    ("forward", 64, False, 10): lab3.Tile(64, 64, 4, 3),
    ("forward", 64, True): lab3.Tile(32, 32, 8, 2),
    ("forward", 128, True): lab3.Tile(16, 32, 4, 2),
    ("dkdv", 64, False, 10): lab3.Tile(32, 64, 4, 2),
    ("dkdv", 64, True): lab3.Tile(32, 32, 8, 1),
    ("dkdv", 128, False, 9): lab3.Tile(32, 64, 8, 1),
    ("dkdv", 128, False): lab3.Tile(32, 64, 8, 2),
    ("dkdv", 256, False): lab3.Tile(32, 32, 8, 1),
    ("dkdv", 256, True): lab3.Tile(16, 16, 8, 1),
    ("dq", 256, False, 9): lab3.Tile(128, 16, 8, 1),
    ("dq", 256, True): lab3.Tile(16, 16, 8, 1),
}

#: Kernel and columns of a tile -> Hopper's through descriptors, where lab 3's would spill.
DESCRIBED = {
    ("dkdv", 128): lab3.Tile(64, 64, 4, 2, True, loads_first=True, masked=False),
    ("dkdv", 256): lab3.Tile(32, 64, 8, 1, True, masked=False),
}
#: The same of kernels with a window, where lab 3's takes longer.
WINDOWED = {("dq", 128): lab3.Tile(64, 64, 4, 2, True)}
#: The same with a causal mask: three programs fit an SM.
CAUSAL = {("dkdv", 64): lab3.Tile(64, 64, 4, 3, True, 168, masked=False)}
#: The same where a query sees few keys.
FEW_KEYS = {("forward", 128): lab3.Tile(64, 64, 4, 2, True, anchored=True)}
#: Fewer keys are few: of a window, or of a document of mean length.
MANY_KEYS = 384


def flash(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    capability: tuple[int, int] | None,
    described: bool = False,
    window: int | None = None,
    length: int | None = None,
    anchored: bool = True,
) -> lab3.Tile:
    """Tile of an attention kernel over documents or windows: lab 3's, or a smaller one where that would spill.

    Args:
        name: ``forward``, ``dkdv`` or ``dq``.
        capability: of the GPU; None in the interpreter.
        described: whether the tensors may have descriptors.
        window: keys that a query sees; None for all.
        length: keys of a sequence, of documents on average (more is not known without waiting for the GPU); None is
            many.
        anchored: whether rows may be anchored, as with a positive scale.
    """
    width, major = lab3.block_d(head_dim), capability[0] if capability else 0
    asked = (name, width, dtype == torch.float32)
    about = head_dim, dtype, causal, capability or (0, 0)
    if described and major == 9 and dtype != torch.float32:
        few = any(keys is not None and keys < MANY_KEYS for keys in (window, length))
        tables = FEW_KEYS if few else {}, WINDOWED if window else {}, CAUSAL if causal else {}, DESCRIBED
        tile = next((table[name, width] for table in tables if (name, width) in table), None)
        tile = tile or getattr(lab3, name)(*about)
        short = window is not None and window < tile.m  # no tile has a key of the window of each query
        return tile._replace(anchored=tile.anchored and anchored and not short)
    if capability and (tile := SMALLER.get((*asked, major)) or SMALLER.get(asked)):
        return tile
    if name == "forward":
        return lab3.forward(*about, described=False, anchored=False)
    return getattr(lab3, name)(*about, described=False)


def delta_warps(head_dim: int, rows: int) -> int:
    """Warps of a program of the delta kernel that takes ``rows`` rows: one for 2048 numbers, as in lab 3."""
    return min(16, max(1, rows * lab3.block_d(head_dim) // 2048))
