"""Which program of a kernel's grid computes which tile of an output: what a failing check points at.

A lab describes its kernel's grid once, and every message then names the owner of a wrong element::

    Tiling("b h row col", tiles={"row": 64}, grid=("row", "b*h"), noun="query tile")

says that program axis 0 counts tiles of 64 rows and that program axis 1 counts the pairs (b, h).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_MAP_COLUMNS, _MAP_LINES = 48, 8


@dataclass(frozen=True)
class Dimension:
    """One axis of an output, or several flattened into one (row-major), cut into tiles of ``tile`` elements.

    ``tile`` is None when one tile spans the whole axis.
    """

    name: str
    axes: tuple[int, ...]
    tile: int | None

    def size(self, shape: Sequence[int]) -> int:
        return math.prod(shape[axis] for axis in self.axes)

    def count(self, shape: Sequence[int]) -> int:
        """Number of tiles along this dimension, at least one."""
        return 1 if self.tile is None else max(1, -(-self.size(shape) // self.tile))

    def position(self, index: Sequence, shape: Sequence[int]):
        """Flat position of an index (numbers or arrays of numbers) along this dimension."""
        flat = 0
        for axis in self.axes:
            flat = flat * shape[axis] + index[axis]
        return flat

    def tile_of(self, index: Sequence, shape: Sequence[int]):
        """Number of the tile that holds an index (numbers or arrays of numbers)."""
        position = self.position(index, shape)
        return position * 0 if self.tile is None else position // self.tile

    def words(self, tile: int, shape: Sequence[int]) -> str:
        """What a tile covers: ``rows 64..127``, ``row 5``, ``elements 1024..2047``."""
        width = self.size(shape) if self.tile is None else self.tile
        start, stop = tile * width, min((tile + 1) * width, self.size(shape))
        noun = self.name if len(self.axes) == 1 else "element"
        if stop - start <= 1:
            return f"{noun} {start}"
        return f"{noun}{'s' if len(noun) > 1 else ''} {start}..{stop - 1}"


@dataclass(frozen=True)
class Tiling:
    """How a kernel's grid covers one output.

    Args:
        axes: Names of the output's axes, outermost first: ``"b h row col"`` or a sequence of names.
        tiles: Elements of an axis that one program computes: ``{"row": 64}``. A key may flatten axes, row-major:
            ``{"row*col": 1024}``. An axis that is in neither ``tiles`` nor ``grid`` belongs to each program whole;
            one that is only in ``grid`` has tiles of one element.
        grid: For each axis of the launch grid, what its ``program_id`` counts: ``("row", "b*h")``. ``"b*h"`` means
            ``program_id = b * H + h``; ``"row*col"`` with tiles of both counts tiles row by row.
        noun: What students call a tile, such as ``"query tile"``.
        loops: Axes of the *inputs* that each program walks in tiles, by the names that cases use: ``{"k": 32}``.
        program: For grids in another order (grouped, reversed): maps tile numbers and tile counts, each by dimension
            name, to the program's coordinates.

    Raises:
        ValueError: a name is not an axis, is used twice, or a tile is not positive.
    """

    axes: Sequence[str] | str
    tiles: Mapping[str, int] = field(default_factory=dict)
    grid: Sequence[str] = ()
    noun: str = "tile"
    loops: Mapping[str, int] = field(default_factory=dict)
    program: Callable[[Mapping[str, int], Mapping[str, int]], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        axes = tuple(self.axes.split()) if isinstance(self.axes, str) else tuple(self.axes)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "grid", (self.grid,) if isinstance(self.grid, str) else tuple(self.grid))
        if len(set(axes)) != len(axes):
            raise ValueError(f"axes must have different names, got {axes}")
        for key, tile in {**self.tiles, **self.loops}.items():
            if not isinstance(tile, int) or isinstance(tile, bool) or tile < 1:
                raise ValueError(f"the tile of {key!r} must be a positive integer, got {tile!r}")
        named = [name for key in (*self.tiles, *self.grid) for name in key.split("*")]
        for name in named:
            if name not in axes:
                raise ValueError(f"{name!r} is not an axis of the output: its axes are {', '.join(axes)}")
        tiled = [name for key in self.tiles for name in key.split("*")]
        if len(set(tiled)) != len(tiled):
            raise ValueError(f"an axis may be in one tile only, got {dict(self.tiles)}")

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """The tiled dimensions, in the order of the axes."""
        keys = list(self.tiles)
        covered = {name for key in keys for name in key.split("*")}
        in_grid = {name for key in self.grid for name in key.split("*")}
        found = [Dimension(k, tuple(self.axes.index(n) for n in k.split("*")), self.tiles[k]) for k in keys]
        for number, name in enumerate(self.axes):
            if name not in covered:
                found.append(Dimension(name, (number,), 1 if name in in_grid else None))
        return tuple(sorted(found, key=lambda dimension: dimension.axes))

    def counts(self, shape: Sequence[int]) -> dict[str, int]:
        """Number of tiles along each dimension, by name."""
        return {dimension.name: dimension.count(shape) for dimension in self.dimensions}

    def tile(self, index: Sequence[int], shape: Sequence[int]) -> dict[str, int]:
        """Number of the tile that holds one element, along each dimension, by name.

        Raises:
            ValueError: the index or the shape has another number of axes than the tiling.
        """
        if len(index) != len(self.axes) or len(shape) != len(self.axes):
            raise ValueError(f"the tiling has axes {self.axes}, got index {tuple(index)} in shape {tuple(shape)}")
        return {dimension.name: int(dimension.tile_of(index, shape)) for dimension in self.dimensions}

    def owner(self, tile: Mapping[str, int], shape: Sequence[int]) -> tuple[int, ...]:
        """Coordinates in the launch grid of the program that computes a tile; ``()`` when ``grid`` is not given."""
        counts = self.counts(shape)
        if self.program is not None:
            return tuple(int(value) for value in self.program(tile, counts))
        program = []
        for key in self.grid:
            number = 0
            for name in [key] if key in tile else key.split("*"):
                number = number * counts[name] + tile[name]
            program.append(number)
        return tuple(program)

    def bad_tiles(self, bad: np.ndarray) -> np.ndarray:
        """Mark the tiles with a wrong element: bool, an axis for each dimension, from bool for each element."""
        marks = np.zeros(tuple(self.counts(bad.shape).values()), dtype=bool)
        index = np.nonzero(bad)
        marks[tuple(dimension.tile_of(index, bad.shape) for dimension in self.dimensions)] = True
        return marks

    def programs(self, shape: Sequence[int]) -> dict[tuple[int, ...], tuple[int, ...]]:
        """The program that computes each tile: tile numbers to grid coordinates."""
        counts = self.counts(shape)
        return {index: self.owner(dict(zip(counts, index)), shape) for index in np.ndindex(*counts.values())}

    def describe(self, index: Sequence[int], shape: Sequence[int]) -> str:
        """Who computes one element: ``program (1, 1): query tile rows 64..127``."""
        tile = self.tile(index, shape)
        shown = [d for d in self.dimensions if d.tile is not None and d.tile > 1]
        shown = shown or [d for d in self.dimensions if d.tile is not None]
        words = f"{self.noun} {', '.join(d.words(tile[d.name], shape) for d in shown)}" if shown else self.noun
        program = self.owner(tile, shape)
        return f"program ({', '.join(map(str, program))}): {words}" if program else words

    def map(self, bad: np.ndarray, index: Sequence[int]) -> list[str]:
        """Draw the tiles around ``index``: '.' right, 'X' wrong; up to two tiled dimensions, the others held fixed.

        Returns no line when there is only one tile.
        """
        shape = bad.shape
        tile, counts = self.tile(index, shape), self.counts(shape)
        several = [d for d in self.dimensions if counts[d.name] > 1]
        wide = [d for d in several if d.tile is not None and d.tile > 1] or several
        drawn = wide[-2:]
        if not drawn:
            return []
        fixed = [d for d in several if d not in drawn]
        marks = self.bad_tiles(bad)
        marks = marks[tuple(slice(None) if d in drawn else tile[d.name] for d in self.dimensions)]
        where = " ".join(f"{d.name}={tile[d.name]}" if d.tile == 1 else f"{d.name} tile {tile[d.name]}" for d in fixed)
        title = f"wrong {self.noun}s{', ' + where if where else ''}:"
        legend = "('.' right, 'X' wrong)"
        rows = ["".join("X" if mark else "." for mark in row) for row in np.atleast_2d(marks)]
        rows = [row if len(row) <= _MAP_COLUMNS else row[: _MAP_COLUMNS - 1] + "…" for row in rows]
        if len(rows) == 1:
            return [f"{title}   {rows[0]}      {legend}"]
        line = tile[drawn[0].name]
        start = 0 if len(rows) <= _MAP_LINES or line < _MAP_LINES else min(line, len(rows) - _MAP_LINES)
        stop = min(start + _MAP_LINES, len(rows))
        above = [f"… {start} lines of tiles above"] if start else []
        below = [f"… {len(rows) - stop} more lines of tiles"] if stop < len(rows) else []
        names = f"one line per tile of {drawn[0].name}, one mark per tile of {drawn[1].name}"
        return [f"{title}   {legend}, {names}", *(f"  {row}" for row in above + rows[start:stop] + below)]
