"""What one warp does: the sectors its addresses touch, and the cycles it spends in branches (exercises 1.7 and 1.9)."""

from collections.abc import Sequence

from utils.operators import require_sizes
from utils.simt import If, Op

SECTOR_BYTES = 32
"""The unit in which HBM and L2 move data: 32 bytes that begin at a multiple of 32."""


def require_addresses(addresses: Sequence[int]) -> None:
    """Refuse an empty list of addresses, and a negative address by its value."""
    if len(addresses) == 0:
        raise ValueError("addresses must hold at least one address, got none")
    for address in addresses:
        if address < 0:
            raise ValueError(f"addresses must not be negative, got {address}")


def sectors_touched(addresses: Sequence[int], access_bytes: int) -> int:
    """Sectors that one load instruction of a warp moves; lanes that want the same sector share it.

    Args:
        addresses: one byte address a lane (32 of them, fewer when lanes are masked off), in any order.
        access_bytes: bytes that each lane loads, beginning at its address; an access may straddle sectors.

    Raises:
        ValueError: no address, a negative address, or ``access_bytes`` below 1.
    """
    require_addresses(addresses)
    require_sizes(access_bytes=access_bytes)
    raise NotImplementedError("Lab 1, exercise 1.7: sectors of an access pattern")


def useful_fraction(addresses: Sequence[int], access_bytes: int) -> float:
    """The share of the moved bytes that some lane asked for: between 0 and 1, a byte that two lanes want counts once.

    Raises:
        ValueError: as :func:`sectors_touched`.
    """
    require_addresses(addresses)
    require_sizes(access_bytes=access_bytes)
    raise NotImplementedError("Lab 1, exercise 1.7: the useful fraction")


def warp_cycles(program: Sequence[Op | If], warp_size: int = 32) -> int:
    """Cycles that a warp needs for a program with branches.

    Args:
        program: instructions in order. An ``Op(name, cycles)`` occupies the whole warp for ``cycles`` cycles, however
            many lanes are active. An ``If(condition, then, otherwise)`` asks ``condition(lane)`` for each active lane,
            runs ``then`` with the lanes that answer True, afterwards ``otherwise`` with the rest, and skips a side that
            has no lanes. After both sides the lanes that came to the branch go on together.
        warp_size: lanes, numbered from 0; all are active at the start.

    Raises:
        ValueError: ``warp_size`` is below 1.
    """
    require_sizes(warp_size=warp_size)
    raise NotImplementedError("Lab 1, exercise 1.9: cycles of a warp")


def wasted_lane_cycles(program: Sequence[Op | If], warp_size: int = 32) -> int:
    """Lane-cycles in which a lane sat idle while the warp executed an instruction for others.

    Raises:
        ValueError: ``warp_size`` is below 1.
    """
    require_sizes(warp_size=warp_size)
    raise NotImplementedError("Lab 1, exercise 1.9: wasted lane-cycles")


def executed(program: Sequence[Op | If], active: list[int]) -> list[tuple[int, int]]:
    """A helper for both: (cycles, number of active lanes) of each ``Op`` that these lanes execute, in order."""
    raise NotImplementedError("Lab 1, exercise 1.9: what a warp executes")
