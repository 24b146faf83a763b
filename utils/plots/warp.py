"""What a warp does: lanes over time where control flow diverges, and the sectors that its accesses move."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.plots.marks import box
from utils.plots.style import ARITHMETIC, HBM, IDLE, INK, MUTED, SMALL, WASTE, WIDTH, figure, styled
from utils.units import number

if TYPE_CHECKING:
    from utils.simt import Access, WarpTrace


@styled
def warp_timeline(trace: WarpTrace, *, title: str) -> Figure:
    """Draw which lanes of a warp work and which wait, operation by operation.

    Args:
        trace: what :func:`utils.simt.run_warp` returned.

    Raises:
        ValueError: a trace without steps.
    """
    if not trace.steps:
        raise ValueError("the trace has no steps: run a program of at least one operation")
    lanes, cycles = trace.warp_size, trace.cycles
    wasted = f"{number(trace.wasted_lane_cycles)} of {number(trace.total_lane_cycles)} lane-cycles"
    subtitle = f"each row is one of {lanes} lanes; blue works, grey waits"
    fig, ax = figure(title, subtitle=subtitle, height=0.075 * lanes + 0.95, grid="none")
    time = 0
    for step in trace.steps:
        first = 0
        for active, run in itertools.groupby(step.mask):
            count = len(list(run))
            face = ARITHMETIC if active else IDLE
            box(ax, time, first, step.cycles, count, face)
            first += count
        count = "" if step.active == lanes else f"{step.active} of {lanes}"
        if (WIDTH - 1) * step.cycles / cycles < 0.075 * len(count):
            count = str(step.active)
        name = f"{step.name}\n{count}".rstrip()
        ax.annotate(
            name, (time + step.cycles / 2, 0), (0, 4), textcoords="offset points", ha="center", va="bottom",
            size=SMALL, color=INK, linespacing=1.15,
        )  # fmt: skip
        time += step.cycles
    for lane in range(1, lanes):
        ax.axhline(lane, color="white", linewidth=0.5)
    for edge in itertools.accumulate((step.cycles for step in trace.steps), initial=0):
        ax.plot([edge, edge], [0, lanes], color="white", linewidth=2.2)
    for cycle in range(1, cycles):
        ax.plot([cycle, cycle], [0, lanes], color="white", linewidth=0.5)
    ax.set_xlim(0, cycles)
    ax.set_ylim(lanes, 0)
    ticks = sorted({*range(0, lanes, 8), lanes - 1})
    ax.set_yticks([lane + 0.5 for lane in ticks], [str(lane) for lane in ticks])
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    ax.spines["bottom"].set_visible(False)
    ax.set_xlabel("time (cycles)")
    ax.set_ylabel("lane")
    steps = "; ".join(f"{s.name}: {s.active} of {lanes} lanes for {s.cycles} cycles" for s in trace.steps)
    fig.alt = f"Timeline of a warp of {lanes} lanes over {cycles} cycles. {steps}. {wasted} are wasted."
    return fig


@dataclass(frozen=True)
class Pattern:
    """An access pattern: which element each thread of a warp touches (None: masked off), and how large elements are.

    ``element_size`` and ``base_offset`` are bytes, as in :func:`utils.simt.access_pattern`.
    """

    name: str
    element_indices: Sequence[int | None]
    element_size: int = 4
    base_offset: int = 0

    def access(self) -> Access:
        """What the pattern moves; its errors are those of :func:`utils.simt.access_pattern`."""
        from utils.simt import access_pattern

        return access_pattern(self.element_indices, self.element_size, self.base_offset)


@styled
def coalescing_map(patterns: Sequence[Pattern], *, title: str) -> Figure:
    """Draw the sectors that the first warp of each pattern moves, side by side, with the bytes that it uses.

    A row is as long as the sectors it moves; in each 32-byte sector the used bytes are coloured and the rest is grey. A
    tick above marks each thread; a line below joins the sectors of one 128-byte line.
    """
    rows = [(p, p.access()) for p in patterns]
    for pattern, access in rows:
        if not access.sectors:
            raise ValueError(f"pattern {pattern.name!r} has no thread that takes part")
    widest = max(access.sectors_per_warp[0] for _, access in rows)
    subtitle = "box: a 32-byte sector, colour used, grey wasted; tick above: a thread; below: 128-byte lines"
    fig, ax = figure(title, subtitle=subtitle, height=0.52 * len(rows) + 0.55, grid="none")
    said = []
    for y, (pattern, access) in enumerate(rows):
        _row(ax, y, pattern, access)
        text = f"{_count(access)}, {number(100 * access.efficiency, 3)} % used"
        said.append(f"{pattern.name}: {text}")
        ax.annotate(
            text, (access.sectors_per_warp[0], y), (7, 0), textcoords="offset points", va="center", size=SMALL,
            color=INK, annotation_clip=False,
        )  # fmt: skip
    ax.set_xlim(-0.05, widest + 0.05)
    ax.set_ylim(len(rows) - 0.35, -0.62)
    ax.set_yticks(range(len(rows)), [p.name for p, _ in rows], color=INK)
    ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    ax.spines["bottom"].set_visible(False)
    ax.set_xlabel("32-byte sectors moved by one warp")
    fig.alt = f"Sectors moved by one warp for {len(rows)} access patterns. {'. '.join(said)}."
    return fig


def _count(access: Access) -> str:
    count = access.sectors_per_warp[0]
    return f"{count} sector{'' if count == 1 else 's'}"


def _row(ax: Axes, y: int, pattern: Pattern, access: Access) -> None:
    size, sector = pattern.element_size, access.sector
    order = {number: place for place, number in enumerate(sorted(access.sector_sets[0]))}
    for place in order.values():
        box(ax, place + 0.03, y - 0.2, 0.94, 0.4, WASTE)
    for index in {i for i in list(pattern.element_indices)[:32] if i is not None}:
        start = pattern.base_offset + int(index) * size
        for a, b in _pieces(start, start + size, sector):
            left = order[a // sector] + 0.03 + 0.94 * (a % sector) / sector
            box(ax, left, y - 0.2, 0.94 * (b - a) / sector, 0.4, HBM)
        centre = (
            order[start // sector] + 0.03 + 0.94 * ((start % sector) + min(size, sector - start % sector) / 2) / sector
        )
        ax.plot([centre, centre], [y - 0.33, y - 0.24], color=INK, linewidth=0.55, solid_capstyle="butt")
    for _, line in itertools.groupby(order, key=lambda number: number * sector // 128):
        places = [order[number] for number in line]
        ends = [places[0] + 0.06, places[-1] + 0.94]
        ax.plot(ends, [y + 0.27] * 2, color=MUTED, linewidth=1.0, solid_capstyle="butt")


def _pieces(start: int, end: int, sector: int) -> list[tuple[int, int]]:
    """Cut bytes [start, end) at sector boundaries."""
    cuts = [start, *range((start // sector + 1) * sector, end, sector), end]
    return list(itertools.pairwise(cuts))
