"""Streaming multiprocessors at work: warps that fit on one, tiles of a matrix, and their waves over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.plots.check import require_between, require_positive
from utils.plots.marks import box
from utils.plots.style import (
    ARITHMETIC,
    IDLE,
    INK,
    LIMIT,
    MUTED,
    SMALL,
    TEXT,
    WASTE_HATCH,
    WIDTH,
    bare,
    figure,
    mix,
    styled,
)
from utils.units import number

if TYPE_CHECKING:
    from utils.hardware import GPU
    from utils.simt import Occupancy, Placement

#: Shades of arithmetic for the waves, first to fourth and round again.
WAVE_COLOURS = tuple(mix(ARITHMETIC, share) for share in (1.0, 0.55, 0.78, 0.36))


@styled
def occupancy_bars(kernels: Mapping[str, Occupancy], gpu: GPU, *, title: str) -> Figure:
    """Draw the warp slots of one SM for each kernel: those its resident blocks fill, and those that stay empty.

    Args:
        kernels: label -> :class:`utils.simt.Occupancy`.
        gpu: the GPU that the occupancies were computed for.
    """
    slots = gpu.max_warps_per_sm
    for label, held in kernels.items():
        require_between(f"warps of {label!r} on an SM of {gpu.name}", [held.warps_per_sm], 0, slots)
    subtitle = f"{slots} warp slots of one SM of {gpu.name}; neighbouring blocks differ in shade, grey is empty"
    fig, ax = figure(title, subtitle=subtitle, height=0.56 * len(kernels) + 0.55, grid="none")
    said = []
    for y, (label, held) in enumerate(kernels.items()):
        per_block = held.warps_per_sm // held.blocks_per_sm if held.blocks_per_sm else 1
        for slot in range(slots):
            filled = slot < held.warps_per_sm
            face = (ARITHMETIC, mix(ARITHMETIC, 0.62))[(slot // per_block) % 2] if filled else IDLE
            box(ax, slot + 0.07, y - 0.06, 0.86, 0.36, face)
        blocks = f"{held.blocks_per_sm} block{'' if held.blocks_per_sm == 1 else 's'} × {per_block} warps"
        percent = f"{number(100 * held.fraction, 3)} %"
        why = "full" if held.fraction == 1 else f"limited by {held.limiter}"
        ax.text(0, y - 0.14, label, size=TEXT, color=INK, va="bottom", weight="bold")
        ax.text(slots, y - 0.14, f"{percent}: {blocks}, {why}", size=SMALL, color=MUTED, va="bottom", ha="right")
        said.append(f"{label}: {percent} ({blocks}), {why}")
    ax.set_xlim(0, slots)
    ax.set_ylim(len(kernels) - 0.62, -0.5)
    ax.set_yticks([])
    ax.set_xticks(range(0, slots + 1, 8))
    ax.spines["bottom"].set_visible(False)
    ax.set_xlabel("warp slots of an SM")
    fig.alt = f"Warp slots of one SM of {gpu.name}, {slots} in all. {'; '.join(said)}."
    return fig


@dataclass(frozen=True)
class TileGrid:
    """An m x n output cut into tiles that take turns on ``slots`` places (SMs times tiles an SM holds)."""

    m: int
    n: int
    tile_m: int
    tile_n: int
    slots: int

    def __post_init__(self) -> None:
        require_positive("a size of a grid", (self.m, self.n, self.tile_m, self.tile_n, self.slots))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.m // self.tile_m), -(-self.n // self.tile_n)

    @property
    def count(self) -> int:
        """Tiles in all."""
        return self.shape[0] * self.shape[1]

    @property
    def waves(self) -> list[int]:
        """Tiles of each wave."""
        full, rest = divmod(self.count, self.slots)
        return [self.slots] * full + ([rest] if rest else [])


@styled
def tile_map(grids: Sequence[TileGrid], *, title: str) -> Figure:
    """Draw the tiles over a matrix, shaded by wave, with what hangs over the edge hatched; up to three side by side.

    Tiles are numbered along rows, as a one-dimensional launch grid visits them.
    """
    require_between("the number of grids", [len(grids)], 1, 3)
    subtitle = "shade: the wave in which a tile is computed; hatched: computed and thrown away"
    fig, axes = figure(
        title, subtitle=subtitle, columns=len(grids), height=WIDTH / max(2, len(grids)) + 0.35, grid="none"
    )
    for ax, grid in zip(np.atleast_1d(axes), grids, strict=True):
        _draw_grid(ax, grid)
    said = (
        f"{g.m} by {g.n} in tiles of {g.tile_m} by {g.tile_n}: {g.count} tiles, {len(g.waves)} waves of {g.slots}, "
        f"the last of {g.waves[-1]}"
        for g in grids
    )
    fig.alt = f"Tiles over an output matrix. {'; '.join(said)}."
    return fig


def _draw_grid(ax: Axes, grid: TileGrid) -> None:
    bare(ax)
    rows, columns = grid.shape
    line = 1.4 if grid.count <= 200 else 0.6 if grid.count <= 1200 else 0.2
    for tile in range(grid.count):
        row, column = divmod(tile, columns)
        corner = (column * grid.tile_n, row * grid.tile_m)
        face = WAVE_COLOURS[(tile // grid.slots) % len(WAVE_COLOURS)]
        box(ax, *corner, grid.tile_n, grid.tile_m, face, edgecolor="white", linewidth=line)
    width, height = columns * grid.tile_n, rows * grid.tile_m
    hatch = {"facecolor": (1, 1, 1, 0.62), "edgecolor": "#7A7A7A", "hatch": WASTE_HATCH, "linewidth": 0}
    if width > grid.n:
        box(ax, grid.n, 0, width - grid.n, height, **hatch)
    if height > grid.m:
        box(ax, 0, grid.m, min(grid.n, width), height - grid.m, **hatch)
    box(ax, 0, 0, grid.n, grid.m, edgecolor=LIMIT, linewidth=1.2)
    ax.set_xlim(-0.01 * width, 1.01 * width)
    ax.set_ylim(1.01 * height, -0.01 * height)
    ax.set_aspect("equal")
    ax.set_anchor("NW")
    waves = grid.waves
    turns = " + ".join(map(str, waves)) if len(waves) <= 4 else f"{len(waves) - 1} × {waves[0]} + {waves[-1]}"
    share = number(100 * grid.m * grid.n / (width * height), 3)
    head = f"{number(grid.m)} × {number(grid.n)}: {number(grid.count)} tiles"
    foot = f"tiles per wave: {turns}\n{share} % of the tiles' area is used"
    ax.set_title(head, loc="left", size=TEXT, weight="bold", color=INK, pad=5)
    ax.text(0, -0.02, foot, transform=ax.transAxes, va="top", size=SMALL, color=MUTED, linespacing=1.3)


@styled
def sm_waves(
    schedule: Sequence[Placement],
    sms: int,
    *,
    title: str = "",
) -> Figure:
    """Draw a schedule of tiles: one row an SM (and slot), time to the right, shaded by turn, grey where nothing runs.

    Args:
        schedule: placements of :func:`utils.simt.schedule_tiles`.
        sms: SMs of the GPU.
    """
    for row in schedule:
        require_between("the SM of a tile", [row.sm], 0, sms - 1)
        if not 0 <= row.start < row.end:
            raise ValueError(f"tile {row.tile} needs 0 <= start < end, got {row.start} to {row.end}")
    per_sm = max(row.slot for row in schedule) + 1
    end = max(row.end for row in schedule)
    busy = sum(row.end - row.start for row in schedule) / (sms * per_sm * end)
    if not title:
        title = f"{number(len(schedule))} tiles leave {sms} SMs idle for {number(100 * (1 - busy), 2)} % of their time"
    subtitle = "each row is an SM; blue: a tile is computed (paler: its next turn), grey: nothing to do"
    fig, ax = figure(title, subtitle=subtitle, height=3.0, grid="none")
    box(ax, 0, 0, end, sms, IDLE)
    turns: dict[tuple[int, int], int] = {}
    lanes = sms * per_sm
    for sm, _, start, stop, slot in schedule:
        turn = turns[sm, slot] = turns.get((sm, slot), -1) + 1
        corner = (start, sm + slot / per_sm)
        face = WAVE_COLOURS[turn % len(WAVE_COLOURS)]
        line = 0.6 if lanes <= 48 else 0.25 if lanes <= 150 else 0
        edge = {"edgecolor": "white", "linewidth": line, "antialiased": line > 0}
        box(ax, *corner, stop - start, 1 / per_sm, face, **edge)
    ax.set_xlim(0, end)
    ax.set_ylim(sms, 0)
    ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_ylabel("SM")
    ax.set_xlabel("time (tile times)")
    ax.spines["bottom"].set_visible(False)
    fig.alt = (
        f"Timeline of {len(schedule)} tiles on {sms} SMs, {per_sm} at a time each: done after {number(end, 4)} tile "
        f"times; {number(100 * busy, 3)} % of the places are busy on average."
    )
    return fig
