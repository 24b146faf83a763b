"""Tiles and waves: how an output is cut into blocks, and how the blocks take turns on the SMs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from utils.simt.memory import _positive


def tiles(m: int, n: int, tile_m: int, tile_n: int) -> int:
    """Tiles of ``tile_m`` x ``tile_n`` that cover an m x n output; those at the edges may hang over.

    Raises:
        TypeError, ValueError: a size that is not a positive integer.
    """
    _positive(m=m, n=n, tile_m=tile_m, tile_n=tile_n)
    return -(-m // tile_m) * -(-n // tile_n)


def tile_efficiency(m: int, n: int, tile_m: int, tile_n: int) -> float:
    """Share of the tiles' elements that lie inside the m x n output: what tile quantisation leaves of the work."""
    return m * n / (tiles(m, n, tile_m, tile_n) * tile_m * tile_n)


@dataclass(frozen=True)
class Waves:
    """How ``num_tiles`` equal tiles take turns on ``slots`` places.

    Attributes:
        count: waves, the last one included.
        tail_tiles: tiles of the last wave (``slots`` when it is full).
        slots: places for a tile: SMs times tiles per SM.
        efficiency: tiles over the places of all waves; 1 when the last wave is full.
    """

    count: int
    tail_tiles: int
    slots: int
    efficiency: float


def waves(num_tiles: int, sms: int, per_sm: int = 1) -> Waves:
    """Waves that ``num_tiles`` equal tiles need on ``sms`` SMs, each holding ``per_sm`` at a time.

    Raises:
        TypeError, ValueError: a number that is not a positive integer.
    """
    _positive(num_tiles=num_tiles, sms=sms, per_sm=per_sm)
    slots = sms * per_sm
    count = -(-num_tiles // slots)
    return Waves(count, num_tiles - (count - 1) * slots, slots, num_tiles / (count * slots))


class Placement(NamedTuple):
    """One tile's place in a schedule: on which SM (and which of its slots), which tile, from when to when."""

    sm: int
    tile: int
    start: float
    end: float
    slot: int = 0


def schedule_tiles(
    num_tiles: int, sms: int, per_sm: int = 1, durations: float | Sequence[float] = 1.0
) -> list[Placement]:
    """The timeline of tiles on SMs under the hardware's greedy rule: the next tile goes to the slot that is free first.

    Tiles start in order, as a GPU's block scheduler issues blocks; ties go to the lowest slot, then to the lowest SM,
    so that every SM has a first tile before any has a second.

    Args:
        num_tiles: tiles, numbered in launch order.
        sms: SMs.
        per_sm: tiles an SM holds at a time (its occupancy, in blocks).
        durations: seconds (or any unit) a tile takes: one figure for all, or one per tile.

    Returns:
        Placements ``(sm, tile, start, end, slot)`` in launch order; ``max(p.end for p in schedule)`` is the makespan.

    Raises:
        TypeError, ValueError: sizes that are not positive integers; too few or too many durations, one not positive.
    """
    _positive(num_tiles=num_tiles, sms=sms, per_sm=per_sm)
    times = (
        [float(durations)] * num_tiles if isinstance(durations, int | float) else [float(each) for each in durations]
    )
    if len(times) != num_tiles:
        raise ValueError(f"durations must be one figure or one per tile ({num_tiles}), got {len(times)}")
    for tile, time in enumerate(times):
        if not 0 < time < float("inf"):
            raise ValueError(f"durations must be positive and finite, got {time} for tile {tile}")
    free = [(0.0, slot, sm) for slot in range(per_sm) for sm in range(sms)]
    heapq.heapify(free)
    schedule = []
    for tile, time in enumerate(times):
        start, slot, sm = heapq.heappop(free)
        schedule.append(Placement(sm, tile, start, start + time, slot))
        heapq.heappush(free, (start + time, slot, sm))
    return schedule
