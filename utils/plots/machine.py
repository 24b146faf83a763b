"""The machine: its memory levels, how far published latencies agree, and how GPUs grew."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from utils.plots.check import require_between, require_positive
from utils.plots.labels import spread
from utils.plots.style import ARITHMETIC, HBM, INK, MUTED, ON_CHIP, SMALL, TEXT, bare, figure, mix, styled
from utils.plots.ticks import binary_bytes, quantity_axis
from utils.units import number, quantity

if TYPE_CHECKING:
    from utils.hardware import GPU

Range = float | tuple[float, float]


@dataclass(frozen=True)
class MemoryLevel:
    """One level of the memory hierarchy of a whole GPU.

    ``capacity`` in bytes; latencies in cycles, one figure or (low, high); bandwidths in bytes/s; None where unknown.
    ``note`` stands below the name. ``colour`` follows the course's meanings.
    """

    name: str
    capacity: float
    latency: Range | None = None
    bandwidth: float | None = None
    measured_latency: Range | None = None
    measured_bandwidth: float | None = None
    note: str = ""
    colour: str = ON_CHIP


@styled
def memory_pyramid(levels: Sequence[MemoryLevel], *, title: str, subtitle: str) -> Figure:
    """Draw the levels from small and fast to large and slow, with capacity, latency and bandwidth of each.

    The width of a level's lower edge grows with the logarithm of its capacity. Published figures are grey,
    measured ones dark; a column without any figure is left out.

    Raises:
        ValueError: capacities that do not grow downwards.
    """
    require_between("the number of levels", [len(levels)], 2, 12)
    require_positive("the capacity of a level", (level.capacity for level in levels))
    for upper, lower in itertools.pairwise(levels):
        if lower.capacity < upper.capacity:
            raise ValueError(f"levels go from small to large: {lower.name!r} is smaller than {upper.name!r} above it")
    ratio = levels[-1].capacity / levels[0].capacity
    fig, ax = figure(title, subtitle=subtitle, height=0.66 * len(levels) + 0.6)
    bare(ax)
    smallest = math.log(levels[0].capacity)
    widths = [0.5 + 0.5 * (math.log(x.capacity) - smallest) / math.log(ratio) for x in levels]
    top = 0.2
    for i, (level, width) in enumerate(zip(levels, widths, strict=True)):
        corners = [(-top / 2, i + 0.03), (top / 2, i + 0.03), (width / 2, i + 0.97), (-width / 2, i + 0.97)]
        ax.add_patch(Polygon(corners, closed=True, facecolor=level.colour, edgecolor="none"))
        middle = {"x": 0, "ha": "center", "va": "center", "color": "white"}
        name = textwrap.fill(level.name, 14)
        low = 0.76 if "\n" in name else 0.70
        ax.text(y=i + (0.38 if level.note else 0.52), s=name, size=TEXT, weight="bold", linespacing=1.0, **middle)
        ax.text(y=i + low, s=level.note, size=SMALL, **middle)
        top = width
    columns = [("capacity", [(binary_or_decimal(x.capacity), "") for x in levels])]
    latencies = [(_cycles(x.latency), _cycles(x.measured_latency)) for x in levels]
    speeds = [(_speed(x.bandwidth), _speed(x.measured_bandwidth)) for x in levels]
    columns += [("latency (cycles)", latencies), ("bandwidth", speeds)]
    x = 0.64
    for name, cells in columns:
        if not any(a or b for a, b in cells):
            continue
        ax.text(x, -0.12, name.replace(" (", "\n("), color=MUTED, size=SMALL, va="bottom", linespacing=1.1)
        for i, (published, own) in enumerate(cells):
            lines = [(own, INK, "bold"), (published, MUTED, "normal")]
            lines = [line for line in lines if line[0]]
            for k, (text, colour, weight) in enumerate(lines):
                y = i + 0.5 + 0.3 * (k - (len(lines) - 1) / 2)
                ax.text(x, y, text, color=colour, size=TEXT, weight=weight, va="center")
        x += 0.36
    for i in range(1, len(levels)):
        ax.plot([0.62, x - 0.04], [i, i], color="#E4E4E4", linewidth=0.8)
    ax.set_xlim(-0.51, x - 0.04)
    ax.set_ylim(len(levels) + 0.02, -0.62)
    fig.alt = "Memory hierarchy from small and fast to large and slow. " + " ".join(_say(level) for level in levels)
    return fig


def binary_or_decimal(capacity: float) -> str:
    """Capacity as makers print it: powers of 1024 for what is built so, powers of 1000 for the rest."""
    return binary_bytes(capacity) if capacity % 1024 == 0 and capacity < 2**30 else quantity(float(capacity), "B", 3)


def _cycles(value: Range | None) -> str:
    if value is None:
        return ""
    low, high = value if isinstance(value, tuple) else (value, value)
    same = number(low, 3) == number(high, 3)
    return number(low, 3) if same else f"{number(low, 3)}–{number(high, 3)}"


def _speed(value: float | None) -> str:
    return "" if value is None else quantity(float(value), "B/s", 3)


def _say(level: MemoryLevel) -> str:
    parts = [binary_or_decimal(level.capacity)]
    for word, latency, speed in (
        ("published", level.latency, level.bandwidth),
        ("measured", level.measured_latency, level.measured_bandwidth),
    ):
        facts = [f"{_cycles(latency)} cycles" if latency else "", _speed(speed)]
        if any(facts):
            parts.append(f"{word} {' and '.join(f for f in facts if f)}")
    return f"{level.name}: {', '.join(parts)}."


@dataclass(frozen=True)
class LatencyRange:
    """Latency of one level in cycles by one method; ``source`` says whose, ``measured`` that it is the course's own."""

    level: str
    low: float
    high: float
    source: str
    measured: bool = False
    colour: str = ON_CHIP

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError(
                f"{self.level!r} ({self.source}): need 0 < low <= high cycles, got {self.low} and {self.high}"
            )


@styled
def latency_ranges(ranges: Sequence[LatencyRange], *, title: str) -> Figure:
    """Draw latencies level by level, on a log axis: what others published (thin), what the course measured (thick)."""
    levels = list(dict.fromkeys(r.level for r in ranges))
    rows = [[r for r in ranges if r.level == level] for level in levels]
    total = sum(len(group) for group in rows) + 0.7 * (len(rows) - 1)
    subtitle = "thick: measured for this course; thin: published by others"
    fig, ax = figure(title, subtitle=subtitle, height=0.235 * total + 0.75, grid="x")
    ax.set_xscale("log")
    y, ticks = 0.0, []
    for group in rows:
        ticks.append(y + (len(group) - 1) / 2)
        for r in group:
            colour = r.colour if r.measured else mix(r.colour, 0.6)
            ax.plot([r.low, r.high], [y, y], color=colour, linewidth=6 if r.measured else 2.4, solid_capstyle="round")
            ax.plot([r.low, r.high], [y, y], "o", color=colour, ms=6.4 if r.measured else 4)
            text = f"{_cycles((r.low, r.high))}  {r.source}"
            weight = "bold" if r.measured else "normal"
            ax.annotate(
                text, (r.high, y), (8, 0), textcoords="offset points", va="center", size=SMALL, weight=weight,
                color=INK if r.measured else MUTED,
            )  # fmt: skip
            y += 1
        y += 0.7
    ax.set_ylim(y - 1.1, -0.7)
    low, high = min(r.low for r in ranges), max(r.high for r in ranges)
    ax.set_xlim(low / 1.3, high * 1.1)
    ax.set_yticks(ticks, levels, color=INK)
    steps = [s * 10**p for p in range(6) for s in (1, 2, 5) if low / 1.3 <= s * 10**p <= high * 1.1]
    ax.set_xticks(steps, [number(s) for s in steps])
    ax.minorticks_off()
    ax.set_xlabel("latency (cycles)")
    said = (f"{r.level}, {r.source}: {_cycles((r.low, r.high))}{' (measured)' if r.measured else ''}" for r in ranges)
    fig.alt = f"Latency in cycles. {'; '.join(said)}."
    return fig


#: Name, colour, how to read it from a GPU, and unit; the 16-bit rate is bf16's, or fp16's before it.
_QUANTITIES = (
    ("16-bit arithmetic", ARITHMETIC, lambda g: g.peak_flops.get("bf16", g.peak_flops.get("fp16")), "FLOP/s"),
    ("fp32 arithmetic", mix(ARITHMETIC, 0.55), lambda g: g.peak_flops.get("fp32"), "FLOP/s"),
    ("memory bandwidth", HBM, lambda g: g.memory_bandwidth, "B/s"),
)


@styled
def generations(gpus: Sequence[GPU], *, title: str) -> Figure:
    """Draw how arithmetic and bandwidth grew from one GPU generation to the next, relative to the first.

    Args:
        gpus: entries of the hardware table; they are put in order of their year.
    """
    gpus = sorted(gpus, key=lambda g: g.year)
    years = [g.year for g in gpus]
    if len(gpus) < 2 or len(set(years)) < len(years):
        named = ", ".join(f"{g.name} ({g.year})" for g in gpus)
        raise ValueError(f"generations needs two or more GPUs of different years, got {named}")
    series = []
    for name, colour, read, unit in _QUANTITIES:
        values = [read(g) for g in gpus]
        if None in values:
            raise ValueError(f"{gpus[values.index(None)].name} has no {name} in the hardware table")
        series.append((name, colour, np.array(values, float), unit))
    subtitle = "dense rates and bandwidths of the data sheets, relative to the first GPU"
    fig, ax = figure(title, subtitle=subtitle, height=3.7)
    ax.set_yscale("log")
    for _, colour, values, _ in series:
        ax.plot(years, values / values[0], color=colour, marker="o", ms=6, linewidth=2.4)
    highest = max((v / v[0]).max() for _, _, v, _ in series)
    lowest = min((v / v[0]).min() for _, _, v, _ in series)
    ax.set_ylim(min(1, lowest) * 0.8, highest * 1.6)
    ax.set_xlim(years[0] - 0.3, years[-1] + 0.2)
    quantity_axis(ax.yaxis, "", f"growth since {gpus[0].name}")
    marks = [m for m in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if min(1, lowest) <= m <= highest * 1.6]
    ax.set_yticks(marks, [f"×{m}" for m in marks])
    ax.minorticks_off()
    names = [f"{g.name}\n{g.year}" for g in gpus]
    ax.set_xticks(years, names)
    fig.draw_without_rendering()
    frame = ax.get_window_extent()
    wanted = [ax.transData.transform((years[-1], v[-1] / v[0]))[1] for _, _, v, _ in series]
    for (name, colour, values, unit), y in zip(series, spread(wanted, 4.1 * SMALL * fig.dpi / 72, frame.y0, frame.y1)):
        text = f"{textwrap.fill(name, 18)} ×{number(values[-1] / values[0], 3)}"
        span = f"{quantity(values[0], unit, 3)}\nto {quantity(values[-1], unit, 3)}"
        place = {"xycoords": "axes fraction", "textcoords": "offset points", "size": SMALL, "annotation_clip": False}
        height = (y - frame.y0) / frame.height
        dark = mix(colour, 0.9, "#000000")
        ax.annotate(text, (1, height), (6, 1), va="bottom", weight="bold", color=dark, **place)
        ax.annotate(span, (1, height), (6, 0), va="top", color=MUTED, linespacing=1.1, **place)
    said = "; ".join(f"{n} from {quantity(v[0], u, 3)} to {quantity(v[-1], u, 3)}" for n, _, v, u in series)
    fig.alt = f"Growth from {gpus[0].name} ({years[0]}) to {gpus[-1].name} ({years[-1]}) on a log scale: {said}."
    return fig
