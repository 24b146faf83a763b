"""The roofline: what a machine can reach at each arithmetic intensity, and where operators really are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from utils.plots.check import require_positive
from utils.plots.labels import label_points
from utils.plots.style import ARITHMETIC, DPI, HBM, LIMIT, MUTED, SMALL, figure, ink, mix, styled
from utils.plots.ticks import quantity_axis
from utils.units import number, quantity

if TYPE_CHECKING:
    from utils.hardware import GPU


@dataclass(frozen=True)
class Ceilings:
    """Two roofs: ``flops`` in FLOP/s and ``bandwidth`` in bytes/s; ``label`` says whose they are."""

    flops: float
    bandwidth: float
    label: str

    def __post_init__(self) -> None:
        require_positive(f"a roof of {self.label!r}", [self.flops, self.bandwidth])

    @property
    def ridge(self) -> float:
        """Intensity in FLOP/B from which arithmetic is the limit."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """FLOP/s under both roofs at ``intensity`` FLOP/B (Williams, Waterman and Patterson 2009)."""
        return min(self.flops, self.bandwidth * intensity)


@dataclass(frozen=True)
class Point:
    """One operator: ``intensity`` in FLOP/B and the ``rate`` it reached in FLOP/s (None: on the roof, hollow)."""

    name: str
    intensity: float
    rate: float | None = None


@styled
def roofline_plot(
    machine: GPU,
    points: Sequence[Point] = (),
    *,
    measured: Ceilings | None = None,
    lower_roofs: Mapping[str, float] | None = None,
    title: str,
    subtitle: str = "",
    limits: tuple[float, float] | None = None,
    height: float = 4.2,
) -> Figure:
    """Draw roofs, the ridge, both regions and labelled points on log axes.

    There is one ridge: that of ``machine``. The shading, the colours of the points and the alternative text go by it,
    also where reached or lower roofs, whose own ridges lie elsewhere, are drawn beside.

    Args:
        machine: whose roofs: a GPU of :mod:`utils.hardware`, whose data-sheet rates for bf16 are drawn.
        points: operators; those left of the ridge take the colour of HBM traffic, the others that of arithmetic.
        measured: roofs that were reached, drawn dashed below those of ``machine``; a point without a rate is on them.
        lower_roofs: FLOP/s of other units of the same machine by name, drawn as thin lines from the memory roof on:
            ``{"fp32 cores": 67e12}``.
        limits: lowest and highest intensity to draw; by default two decades around the points and the ridge.
    """
    top = Ceilings(machine.peak_flops["bf16"], machine.memory_bandwidth, f"{machine.name} data sheet, bf16")
    roof = measured or top
    for p in points:
        if not 0 < p.intensity < math.inf or not (p.rate is None or 0 < p.rate < math.inf):
            raise ValueError(
                f"{p.name!r} does no arithmetic (intensity {p.intensity:g} FLOP/B): it has no place on a log axis"
            )
    lower = {name: Ceilings(rate, top.bandwidth, name) for name, rate in (lower_roofs or {}).items()}
    for name, other in lower.items():
        if other.flops >= top.flops:
            raise ValueError(f"lower roof {name!r} must be below {top.flops:g} FLOP/s, got {other.flops:g}")
    intensities = [p.intensity for p in points] + [top.ridge]
    low, high = limits or (
        10 ** math.floor(math.log10(min(intensities) / 2)),
        max(max(intensities) * 3, top.ridge * 34),
    )
    if not 0 < low < high:
        raise ValueError(f"limits must be 0 < low < high FLOP/B, got {limits!r}")
    placed = [(p, p.rate or roof.attainable(p.intensity)) for p in points]
    bound = [p.intensity < top.ridge for p, _ in placed]
    if measured:
        memory = number(100 * measured.bandwidth / top.bandwidth, 2)
        reached = (
            f"dashed: reached, {memory} % of bytes/s and {number(100 * measured.flops / top.flops, 2)} % of FLOP/s"
        )
        subtitle = "; ".join(filter(None, [subtitle, reached]))
    fig, ax = figure(title, subtitle=subtitle, height=height)
    ax.tick_params(axis="x", pad=7)  # clear of the label at the foot of the other axis
    ax.set_xscale("log")
    ax.set_yscale("log")
    lowest = min([rate for _, rate in placed] + [top.attainable(low)])
    bottom, ceiling = 10 ** math.floor(math.log10(lowest / 2)), top.flops * 8  # room for names above the roof
    ax.set_xlim(low, high)
    ax.set_ylim(bottom, ceiling)

    lines = _draw_roofs(ax, top, measured, lower, low, high, bottom)
    for (point, rate), memory in zip(placed, bound, strict=True):
        colour = HBM if memory else ARITHMETIC
        face = "white" if point.rate is None else colour
        ax.plot(point.intensity, rate, "o", ms=6.5, mfc=face, mec=colour, mew=1.4, zorder=4, clip_on=False)
    quantity_axis(ax.xaxis, "FLOP/B", "arithmetic intensity")
    quantity_axis(ax.yaxis, "FLOP/s", "rate")
    boxes = _write_roofs(ax, top, lower, low, high, bottom, [p.intensity for p, _ in placed])
    texts = [p.name for p in points]
    colours = [ink(HBM if m else ARITHMETIC) for m in bound]
    label_points(ax, [(p.intensity, rate) for p, rate in placed], texts, colours=colours, avoid=lines, keep_clear=boxes)
    fig.alt = fig_alt(top, measured, lower, placed, bound)
    return fig


def _draw_roofs(
    ax: Axes,
    top: Ceilings,
    measured: Ceilings | None,
    lower: Mapping[str, Ceilings],
    low: float,
    high: float,
    bottom: float,
) -> list:
    """Shade both regions and draw the roofs and the ridge; return the lines as (xs, ys)."""
    xs = np.array([low, top.ridge, high])
    ys = np.array([top.attainable(x) for x in xs])
    for under, colour in ((xs[:2], HBM), (xs[1:], ARITHMETIC)):
        tops = [top.attainable(x) for x in under]
        ax.fill_between(under, bottom, tops, color=mix(colour, 0.08), linewidth=0, zorder=0.5)
    ax.plot(xs, ys, color=LIMIT, linewidth=1.1, zorder=2)
    lines = [(xs, ys)]
    if measured:
        reached = np.array([low, measured.ridge, high])
        lines.append((reached, [measured.attainable(x) for x in reached]))
        ax.plot(*lines[-1], color=LIMIT, linewidth=1.1, linestyle=(0, (5, 3)), zorder=2)
    for other in lower.values():
        lines.append(([max(low, other.ridge), high], [other.attainable(max(low, other.ridge)), other.flops]))
        ax.plot(*lines[-1], color=LIMIT, linewidth=0.6, zorder=1.8)
    lines.append(([top.ridge] * 2, [bottom, top.flops]))
    ax.plot(*lines[-1], color=LIMIT, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1.5)
    return lines


def _write_roofs(
    ax: Axes,
    top: Ceilings,
    lower: Mapping[str, Ceilings],
    low: float,
    high: float,
    bottom: float,
    xs: list,
) -> list:
    """Name the roofs along their lines, the ridge and the two regions; return the boxes in pixels."""
    fig = ax.figure
    fig.draw_without_rendering()
    a, b = ax.transData.transform([(low, top.bandwidth * low), (top.ridge, top.flops)])
    angle = math.degrees(math.atan2(b[1] - a[1], b[0] - a[0]))
    # the name of the memory roof stands where the operators leave it the most room
    starts = [low * (top.ridge / low) ** t for t in np.linspace(0.03, 0.62, 40)]
    text = quantity(float(top.bandwidth), "B/s", 3)
    width = (high / low) ** (0.0075 * len(text))  # half of its own
    start = max(
        starts, key=lambda s: min([abs(math.log(x / (s * width))) for x in xs] or [0]) - 0.01 * math.log(s / low)
    )
    slope = {"rotation": angle, "rotation_mode": "anchor", "size": SMALL, "color": LIMIT, "textcoords": "offset points"}
    shift = (-4 * math.sin(math.radians(angle)), 4 * math.cos(math.radians(angle)))
    notes = [ax.annotate(text, (start, top.bandwidth * start), shift, **slope)]
    text = quantity(float(top.flops), "FLOP/s", 3)
    flat = {"size": SMALL, "textcoords": "offset points"}
    notes.append(ax.annotate(text, (high, top.flops), (-2, 4), ha="right", color=LIMIT, **flat))
    for name, other in lower.items():
        text = f"{quantity(float(other.flops), 'FLOP/s', 3)}: {name}"
        notes.append(ax.annotate(text, (high, other.flops), (-2, 3), ha="right", color=LIMIT, **flat))
    ridge = f"ridge {number(top.ridge, 3)} FLOP/B"
    notes.append(ax.annotate(ridge, (top.ridge, bottom), (4, 4), ha="left", va="bottom", color=MUTED, **flat))
    left, right = ink(HBM), ink(ARITHMETIC)
    notes.append(
        ax.annotate("memory-bound", (top.ridge, bottom), (-6, 18), ha="right", weight="bold", color=left, **flat)
    )
    notes.append(
        ax.annotate("compute-bound", (top.ridge, bottom), (6, 18), ha="left", weight="bold", color=right, **flat)
    )
    renderer = fig.canvas.get_renderer()
    for note in notes:
        note.set_in_layout(False)
    boxes = [note.get_window_extent(renderer) for note in notes]
    return boxes[1:] + _along(boxes[0], angle)


def _along(box: Bbox, angle: float, parts: int = 12) -> list[Bbox]:
    """Small boxes along a rising text, whose own bounding box would keep far too much clear."""
    thickness = SMALL * 1.4 * DPI / 72 / math.cos(math.radians(angle))
    t = (np.arange(parts) + 0.5) / parts
    xs, ys = box.x0 + t * box.width, box.y0 + t * box.height
    half = box.width / parts / 2
    return [Bbox.from_extents(x - half, y - thickness / 2, x + half, y + thickness / 2) for x, y in zip(xs, ys)]


def fig_alt(
    top: Ceilings,
    measured: Ceilings | None,
    lower: Mapping[str, Ceilings],
    placed: Sequence,
    bound: Sequence[bool],
) -> str:
    """Alternative text of a roofline, from its data."""
    text = (
        f"Roofline of {top.label}: memory roof {quantity(float(top.bandwidth), 'B/s', 3)}, arithmetic roof "
        f"{quantity(float(top.flops), 'FLOP/s', 3)}, ridge at {number(top.ridge, 3)} FLOP/B."
    )
    if measured:
        reached = quantity(float(measured.bandwidth), "B/s", 3), quantity(float(measured.flops), "FLOP/s", 3)
        text += f" Reached, dashed: {' and '.join(reached)}."
    for name, other in lower.items():
        text += f" Thin roof of the {name}: {quantity(float(other.flops), 'FLOP/s', 3)}."
    for (point, rate), memory in zip(placed, bound, strict=True):
        side = "memory-bound" if memory else "compute-bound"
        name = " ".join(point.name.split())
        text += f" {name}: {number(point.intensity, 3)} FLOP/B, {quantity(float(rate), 'FLOP/s', 3)}, {side}."
    return text
