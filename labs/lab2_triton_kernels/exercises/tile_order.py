"""In which order programs compute the tiles of a matrix product: read off the elements that each program wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from utils.checks.core import classic
from utils.checks.diagnoses import CaseResult
from utils.checks.launches import cdiv, sizes
from utils.checks.problem import Problem
from utils.kernel_profile import LaunchProfile

#: Row and column of a tile; None for a program that wrote nothing.
Place = tuple[int, int] | None
#: (program, rows of tiles, columns of tiles, rows in a group) -> the tile that the program computes.
Order = Callable[[int, int, int, int], tuple[int, int]]


def grouped(pid: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    """The order that exercise 2.8 asks for."""
    first = pid // (group * tiles_n) * group
    rows = min(group, tiles_m - first)
    place = pid % (group * tiles_n)
    return first + place % rows, place // rows


def _full_groups(pid: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    place = pid % (group * tiles_n)
    return pid // (group * tiles_n) * group + place % group, place // group


def _all_rows_left(pid: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    first = pid // (group * tiles_n) * group
    place = pid % (group * tiles_n)
    return first + place % max(1, tiles_m - first), place // max(1, tiles_m - first)


def _groups_of_columns(pid: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    column, row = grouped(pid, tiles_n, tiles_m, group)
    return row, column


def _group_numbers(pid: int, tiles_m: int, tiles_n: int, group: int) -> tuple[int, int]:
    first = pid // (group * tiles_n)
    rows = max(1, min(group, tiles_m - first))
    place = pid % (group * tiles_n)
    return first + place % rows, place // rows


#: Wrong orders, and what leads to them.
WRONG_ORDERS: tuple[tuple[Order, str], ...] = (
    (
        lambda pid, tiles_m, tiles_n, group: (pid // tiles_n, pid % tiles_n),
        classic("tiles follow one another row by row, within a group or without one: go down a group's rows first", 2),
    ),
    (
        _full_groups,
        classic(
            "the last group has fewer rows than GROUP_M: its programs leave the matrix and its tiles stay empty", 1
        ),
    ),
    (_all_rows_left, classic("a group takes all the rows that are left: it has at most GROUP_M", 1)),
    (
        lambda pid, tiles_m, tiles_n, group: (pid % tiles_m, pid // tiles_m),
        classic("tiles follow one another column by column, over all rows: there are no groups", 2),
    ),
    (_groups_of_columns, classic("the groups are made of columns: GROUP_M counts rows of tiles", 2)),
    (_group_numbers, classic("the group's number stands where its first row belongs: multiply it by GROUP_M", 1)),
)


@dataclass(frozen=True)
class TileOrder:
    """Which tile each program of a launch computed, in a grid of ``tiles_m`` by ``tiles_n`` tiles."""

    places: tuple[Place, ...]
    tiles_m: int
    tiles_n: int
    group: int

    def follows(self, order: Order) -> bool:
        """Whether every program computed the tile that ``order`` gives it; a tile outside of the grid is no tile."""
        return self.places == tuple(self._inside(order(pid, *self._shape)) for pid in range(len(self.places)))

    @property
    def _shape(self) -> tuple[int, int, int]:
        return self.tiles_m, self.tiles_n, self.group

    def _inside(self, place: tuple[int, int]) -> Place:
        return place if 0 <= place[0] < self.tiles_m and 0 <= place[1] < self.tiles_n else None

    def wanted(self) -> tuple[Place, ...]:
        """The right order."""
        return tuple(grouped(pid, *self._shape) for pid in range(self.tiles_m * self.tiles_n))

    def drawn(self, places: tuple[Place, ...]) -> list[str]:
        """The grid of tiles, each with the number of the program that computes it; a dot where none does."""
        number = {place: pid for pid, place in enumerate(places)}
        width = len(str(len(places)))
        rows = [[number.get((m, n), ".") for n in range(self.tiles_n)] for m in range(self.tiles_m)]
        return [" ".join(f"{mark:>{width}}" for mark in row) for row in rows]


def read_off(launch: LaunchProfile, output: str) -> TileOrder:
    """The order of a launch with ``M``, ``N``, ``BLOCK_M``, ``BLOCK_N`` and ``GROUP_M`` into a contiguous output."""
    given = sizes(launch)
    width, block_m, block_n = given["N"], given["BLOCK_M"], given["BLOCK_N"]
    places: list[Place] = []
    for pid in range(launch.grid[0]):
        span = launch.written.get(((pid, 0, 0), output))
        places.append((span[0] // width // block_m, span[0] % width // block_n) if span else None)
    return TileOrder(tuple(places), cdiv(given["M"], block_m), cdiv(width, block_n), given["GROUP_M"])


def cause_of(order: TileOrder) -> str | None:
    """What leads to an order that is not the grouped one, '' if that cannot be said, or None when it is."""
    if order.follows(grouped):
        return None
    return next((cause for wrong, cause in WRONG_ORDERS if order.follows(wrong)), "")


def wrong_order(kernel: str, output: str) -> Callable[[CaseResult], Problem | None]:
    """An inspection: the programs of ``kernel`` take their tiles in the grouped order."""

    def inspect(trial: CaseResult) -> Problem | None:
        launch = next((launch for launch in trial.profile.launches if launch.kernel == kernel), None)
        if launch is None:
            return Problem(f"{kernel} is never launched", "keep the stub's names")
        order = read_off(launch, output)
        cause = cause_of(order)
        if cause is None:
            return None
        wanted = order.wanted()
        first = next((n for n, pair in enumerate(zip(order.places, wanted)) if pair[0] != pair[1]), 0)
        place = order.places[first] if first < len(order.places) else None
        computes = f"got tile {place}" if place else "got no tile"
        size = f"{order.tiles_m} x {order.tiles_n} tiles, GROUP_M={order.group}"
        pairs = zip(order.drawn(order.places), order.drawn(wanted))
        lines = [f"{yours}     {right}" for yours, right in pairs]
        head = "programs by tile: yours".ljust(len(lines[0]) // 2 + 2) + " and expected"
        return Problem(f"program {first}: expected tile {wanted[first]}, {computes} ({size})", cause, (head, *lines))

    return inspect
