"""What a warp's memory access costs: 32-byte sectors in global memory, bank conflicts in shared memory.

Global memory is served in sectors of 32 bytes, four of which make a cache line of 128. A warp's load moves every sector
that any of its lanes touches, once, however little of it is used. Shared memory is 32 banks of 4-byte words; in one
pass each bank gives one word, to as many lanes as ask for that same word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SECTOR_BYTES = 32
LINE_BYTES = 128
WARP_SIZE = 32
NUM_BANKS = 32
BANK_BYTES = 4


def _addresses(values: Iterable[int], what: str) -> list[int]:
    result = []
    for value in values:
        number = value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else None
        if number is None:
            raise TypeError(f"{what} must be integers, got {value!r}")
        if number < 0:
            raise ValueError(f"{what} must not be negative, got {number}")
        result.append(number)
    return result


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def touched_sectors(byte_addresses: Iterable[int], access_bytes: int, sector: int = SECTOR_BYTES) -> frozenset[int]:
    """The numbers (address // ``sector``) of the sectors that accesses of ``access_bytes`` at these addresses touch."""
    _positive(access_bytes=access_bytes, sector=sector)
    touched: set[int] = set()
    for address in _addresses(byte_addresses, "byte addresses"):
        touched.update(range(address // sector, (address + access_bytes - 1) // sector + 1))
    return frozenset(touched)


def sectors(byte_addresses: Iterable[int], access_bytes: int, sector: int = SECTOR_BYTES) -> int:
    """Sectors that one memory instruction moves when its lanes access ``access_bytes`` bytes at these addresses.

    Each sector counts once, however many lanes share it; an access that crosses a boundary touches two. Masked-off
    lanes are left out of ``byte_addresses``.

    Raises:
        TypeError: an address or size is not an integer.
        ValueError: an address is negative, a size below 1.
    """
    return len(touched_sectors(byte_addresses, access_bytes, sector))


@dataclass(frozen=True)
class Access:
    """What an access pattern moves, warp by warp.

    Attributes:
        sectors: 32-byte sectors moved, summed over warps.
        lines: 128-byte lines touched, summed over warps.
        bytes_requested: bytes the lanes asked for (shared ones once per lane).
        bytes_used: distinct bytes asked for, per warp, summed: what of the moved bytes is good for something.
        warps: warps that took part.
        sectors_per_warp: sectors of each warp.
        sector_sets: the sector numbers that each warp touched, for figures.
        sector: bytes of a sector.
    """

    sectors: int
    lines: int
    bytes_requested: int
    bytes_used: int
    warps: int
    sectors_per_warp: tuple[int, ...]
    sector_sets: tuple[frozenset[int], ...]
    sector: int = SECTOR_BYTES

    @property
    def bytes_moved(self) -> int:
        """Bytes moved: sectors times their size."""
        return self.sectors * self.sector

    @property
    def efficiency(self) -> float:
        """Useful bytes over moved bytes, at most 1; 1 when nothing was moved."""
        return self.bytes_used / self.bytes_moved if self.sectors else 1.0


def access_pattern(
    element_indices: Sequence[int | None],
    element_size: int,
    base_offset: int = 0,
    warp_size: int = WARP_SIZE,
    sector: int = SECTOR_BYTES,
) -> Access:
    """The cost of threads 0, 1, 2... accessing these elements of an array, in warps of ``warp_size`` threads.

    Args:
        element_indices: the element that each thread accesses, in thread order; None for a thread that is masked off.
        element_size: bytes of an element.
        base_offset: bytes from a sector-aligned address to the array's first element (allocations are aligned: 0).
        warp_size: threads of a warp.
        sector: bytes of a sector.

    Raises:
        TypeError, ValueError: as in :func:`sectors`.
    """
    _positive(element_size=element_size, warp_size=warp_size, sector=sector)
    _addresses([base_offset], "base_offset")
    indices = list(element_indices)
    _addresses((index for index in indices if index is not None), "element indices")
    sets, lines, requested, used = [], 0, 0, 0
    for start in range(0, len(indices), warp_size):
        warp = [base_offset + int(i) * element_size for i in indices[start : start + warp_size] if i is not None]
        sets.append(touched_sectors(warp, element_size, sector))
        lines += sectors(warp, element_size, LINE_BYTES)
        requested += len(warp) * element_size
        used += len(set(warp)) * element_size
    counts = tuple(len(each) for each in sets)
    return Access(sum(counts), lines, requested, used, len(sets), counts, tuple(sets), sector)


def bank_passes(word_addresses: Sequence[int | None], access_bytes: int = BANK_BYTES) -> list[int]:
    """Passes over the banks that a shared-memory instruction of one warp needs, phase by phase.

    The banks give 128 bytes in a pass, so a warp that accesses 8 bytes a lane goes in two phases of 16 lanes, and one
    that accesses 16 in four phases of 8; conflicts arise within a phase only.

    Args:
        word_addresses: for each lane, in order, the number of the first 4-byte word that it accesses (its byte
            address / 4); None for a lane that is masked off.
        access_bytes: bytes a lane accesses: 4, 8 or 16.

    Returns:
        For each phase with an active lane the most distinct words that any bank must give. Lanes that access the same
        word share it (broadcast).

    Raises:
        TypeError: an address is no integer.
        ValueError: more lanes than a warp has, a negative or (for wide accesses) misaligned address, another width.
    """
    if access_bytes not in (4, 8, 16):
        raise ValueError(f"access_bytes must be 4, 8 or 16, got {access_bytes!r}")
    words = list(word_addresses)
    if len(words) > WARP_SIZE:
        raise ValueError(f"word_addresses are those of one warp, at most {WARP_SIZE}, got {len(words)}")
    width = access_bytes // BANK_BYTES
    for word in _addresses((each for each in words if each is not None), "word addresses"):
        if word % width:
            raise ValueError(f"{access_bytes}-byte accesses must start at multiples of {width} words, got word {word}")
    lanes = WARP_SIZE // width
    passes = []
    for start in range(0, len(words), lanes):
        banks: dict[int, set[int]] = defaultdict(set)
        for first in words[start : start + lanes]:
            for word in () if first is None else range(int(first), int(first) + width):
                banks[word % NUM_BANKS].add(word)
        if banks:
            passes.append(max(len(distinct) for distinct in banks.values()))
    return passes


def bank_conflicts(word_addresses: Sequence[int | None], access_bytes: int = BANK_BYTES) -> int:
    """Degree of the worst conflict: 1 is conflict-free, 32 serialises the warp; 0 when no lane takes part.

    Arguments and errors as in :func:`bank_passes`.
    """
    return max(bank_passes(word_addresses, access_bytes), default=0)
