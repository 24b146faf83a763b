"""Every number that tunes the kernels for long sequences.

No GPU has measured these yet, but for what a part of a context costs (:func:`mla_splits`): they follow from registers
and shared memory, by the compiler's word (``tests/test_lab6_long_compile.py``).
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


def flash(name: str, head_dim: int, dtype: torch.dtype, causal: bool, capability: tuple[int, int] | None) -> lab3.Tile:
    """Tile of an attention kernel over documents: lab 3's where tiles come through pointers, or a smaller one.

    Args:
        name: ``forward``, ``dkdv`` or ``dq``.
        capability: of the GPU; None in the interpreter.
    """
    width, major = lab3.block_d(head_dim), capability[0] if capability else 0
    asked = (name, width, dtype == torch.float32)
    if capability and (tile := SMALLER.get((*asked, major)) or SMALLER.get(asked)):
        return tile
    about = head_dim, dtype, causal, capability or (0, 0)
    if name == "forward":
        return lab3.forward(*about, described=False, anchored=False)
    return getattr(lab3, name)(*about, described=False)
