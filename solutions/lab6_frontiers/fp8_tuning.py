"""Every number that tunes the kernels over an fp8 cache.

They follow from registers, shared memory and the bytes that are under way. One case decided between tiles of the
decode kernel, on an H200 (Triton 3.6, 2026-11-30): 64 sequences of 8,192 tokens, 32 query heads, 8 key heads, D = 128
and blocks of 16. It reaches 0.99 of the speed of a copy of as many bytes. It reached 0.77 when the warps of a program
shared a tile of 64 tokens. Where a thread may take more than 128 registers it reaches 0.80: three programs fit on an
SM then, not four, so that the 512 programs of this case no longer run at once.

Where more programs are to run than do at once, one warp each is better, since a program that is over leaves less of the
SM idle until the next has begun: 256 sequences of 228 to 1,152 tokens, 16 query heads, take 99 us; 102 with two warps,
119 with four. (The case above takes 254, 258 and 260 us with four, two and one.)

Extend: chunks of 100 to 1,024 tokens, 8,192 together, of the same model. Tiles of 64 x 64, four warps, without software
pipelining take 182 us, in two or three stages 201 and 196; eight warps in two stages 334; 128 x 64 and eight warps
without pipelining 185. Lab 5's kernel over bf16 takes 134: what is left is the conversion of keys and values.

Tiles for other head dimensions or for more than 8 query heads of a key head have not been measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils import runtime

from .tuning import power_of_two


class DecodeTile(NamedTuple):
    """Rows of queries (8 or 16), tokens of a warp, warps, stages of software pipelining, and registers of a thread."""

    m: int
    n: int
    warps: int
    stages: int
    registers: int

    @property
    def programs_per_sm(self) -> int:
        """Programs whose registers fit on an SM."""
        return REGISTERS // (32 * self.warps * self.registers)


class ExtendTile(NamedTuple):
    """Rows of queries and tokens of a tile of scores, warps of a program, and stages of software pipelining."""

    m: int
    n: int
    warps: int
    stages: int


#: Of an SM, since Kepler.
REGISTERS = 65536
#: Tokens of a part, at least, and parts of a context, at most.
SHORTEST_PART = runtime.pick(cpu=16, gpu=256)
MOST_PARTS = 128


def block_d(head_dim: int) -> int:
    """Columns of a tile of q, k or v: a power of two, at least 16."""
    return max(16, power_of_two(head_dim))


def converts_e4m3(device: torch.device) -> bool:
    """Whether kernels there have e4m3 as a type: from Ada (8.9) on, and in the interpreter."""
    return runtime.INTERPRET or torch.cuda.get_device_capability(device) >= (8, 9)


def decode(head_dim: int, group: int, key_heads: int, sms: int) -> DecodeTile:
    """Tile of the decode kernel for ``group`` query heads of each of a batch's ``key_heads``, S * G."""
    width = block_d(head_dim)
    m = 8 if group <= 8 or width > 128 else 16
    if runtime.INTERPRET:
        return DecodeTile(m, 16, 2, 1, 255)
    registers = 255 if width > 128 else 128 if m == 8 or width <= 64 else 168
    tile = DecodeTile(m, 32 if width <= 64 else 16, 4, 5, registers)
    return tile if key_heads * -(-group // m) <= tile.programs_per_sm * sms else tile._replace(warps=1)


def extend(head_dim: int, padded: int, block_size: int, native: bool) -> ExtendTile:
    """Tile of the extend kernel: rows are queries times the query heads of a key head, ``padded`` to a power of two.

    ``native`` says whether kernels have e4m3 as a type. Without it, four warps have too few registers at D = 128.
    """
    if runtime.INTERPRET:
        return ExtendTile(max(16, padded), max(16, block_size), 4, 1)
    width = block_d(head_dim)
    m, n = (32, 32) if width > 128 else (64, 64)
    warps, stages = (4, 2) if width != 128 else (4, 1) if native else (8, 2)
    return ExtendTile(max(m, padded), max(n, block_size), warps, stages)


def splits(rows: int, longest: int, programs: int) -> int:
    """Parts of every context: as many as run at once.

    Args:
        rows: programs if nothing is split.
        longest: the most tokens that a context may have.
        programs: that fit on the GPU at once.
    """
    return max(1, min(programs // max(1, rows), longest // SHORTEST_PART, MOST_PARTS))
