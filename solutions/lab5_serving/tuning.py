"""Every number that tunes a kernel of this lab, in one place, with the measurement that chose it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from utils import runtime


class Tile(NamedTuple):
    """Rows of queries and tokens of a tile of scores, warps of a program, and stages of software pipelining."""

    m: int
    n: int
    warps: int
    stages: int


def block_d(head_dim: int) -> int:
    """Columns of a tile of q, k or v: a power of two, at least 16."""
    return max(16, power_of_two(head_dim))


def power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for the interpreter."""
    return (0, 0) if runtime.INTERPRET else torch.cuda.get_device_capability(device)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 for the interpreter, whose programs run one after another anyway."""
    return 2 if runtime.INTERPRET else torch.cuda.get_device_properties(device).multi_processor_count


def decode(head_dim: int, dtype: torch.dtype, group: int, capability: tuple[int, int]) -> Tile:
    """Tile of the decode kernel: the ``group`` query heads of a key head, padded, against ``n`` tokens at a time."""
    m = max(16, power_of_two(group))
    if runtime.INTERPRET:
        return Tile(m, 16, 4, 1)
    width = block_d(head_dim)
    if dtype == torch.float32:
        return Tile(m, 32 if width <= 128 else 16, 4, 2)
    return Tile(m, 64 if width <= 128 else 32, 4, 3)


def extend(head_dim: int, dtype: torch.dtype, group: int, capability: tuple[int, int]) -> Tile:
    """Tile of the extend kernel: ``m`` rows are the queries of a tile times the query heads of a key head."""
    if runtime.INTERPRET:
        return Tile(max(16, power_of_two(group)), 16, 4, 1)
    width = block_d(head_dim)
    least = power_of_two(group)
    if dtype == torch.float32:
        return Tile(max(32 if width <= 128 else 16, least), 32 if width <= 128 else 16, 4, 2 if width <= 128 else 1)
    return Tile(max(64, least), 64 if width <= 128 else 32, 4, 2)


def merge(parts: int, width: int) -> Tile:
    """Tile of the merge: ``n`` parts at a time of one row."""
    if runtime.INTERPRET:
        return Tile(1, min(8, max(2, power_of_two(parts))), 4, 1)
    return Tile(1, min(32, max(2, power_of_two(parts))), 4, 1)


def splits(rows: int, longest: int, sms: int) -> int:
    """Parts of every context: as many as let ``rows`` programs (sequences x key heads) fill the GPU, and no more.

    Args:
        rows: Sequences times key heads: programs if nothing is split.
        longest: The most tokens that a context may have.
        sms: Multiprocessors.
    """
    wanted = -(-2 * sms // max(1, rows))
    return max(1, min(wanted, longest // runtime.pick(cpu=16, gpu=256), 128))


def write(heads: int, width: int) -> Tile:
    """Tile of the cache write: ``n`` key heads of one token."""
    return Tile(1, min(power_of_two(heads), max(1, 2048 // width)), 4, 1)
