"""Measured curves: what was recorded, what this machine gives now, and what a model says."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from utils.plots.labels import label_points, spread
from utils.plots.style import ARITHMETIC, LIMIT, MUTED, SMALL, figure, ink, mix, styled
from utils.plots.ticks import quantity_axis
from utils.units import quantity

#: line width, line style, marker, label weight
_STYLES = {
    "recorded": (1.3, "-", "o", "normal"),
    "live": (2.8, "-", "o", "bold"),
    "model": (1.1, (0, (5, 3)), "", "normal"),
    "peer": (1.0, "-", "", "normal"),
}
#: Inches that the axes have beside the names of their curves, about.
_AXES = 3.6


@dataclass(frozen=True)
class Series:
    """One curve. ``y`` in SI units; ``low`` and ``high`` bound its spread (20th and 80th percentile).

    ``kind`` is "recorded" (thin), "live" (thick, measured on this machine now), "model" (dashed) or "peer" (thin).
    ``x`` replaces the sweep's own when this curve has other points.
    """

    label: str
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    kind: str = "recorded"
    colour: str = ARITHMETIC
    x: Sequence[float] | None = None
    markers: bool = True

    def __post_init__(self) -> None:
        if self.kind not in _STYLES:
            raise ValueError(f"kind of {self.label!r} must be one of {', '.join(_STYLES)}, got {self.kind!r}")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"{self.label!r}: give both low and high of the spread, or neither")
        for name in ("y", "low", "high"):
            values = getattr(self, name)
            if values is not None and (len(values) == 0 or not np.isfinite(np.asarray(values, float)).all()):
                raise ValueError(f"{self.label!r}: {name} must be finite numbers, at least one, got {values!r}")


@styled
def sweep(
    x: Sequence[float],
    series: Sequence[Series],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    x_unit: str = "",
    y_unit: str = "",
    xscale: str = "log2",
    yscale: str = "log",
    subtitle: str = "",
    limits: Mapping[str, float] | None = None,
    marks: Mapping[str, float] | None = None,
    height: float = 3.4,
) -> Figure:
    """Draw curves over a swept size, each named at its end.

    Args:
        x: swept values, shared by the series that bring none of their own.
        x_unit, y_unit: SI units; "B" on a log2 axis is printed in KiB and MiB.
        xscale, yscale: "linear", "log" or "log2".
        limits: horizontal thin black lines, by label: ``{"H100 data sheet": 3.35e12}``.
        marks: vertical dotted lines, by label: ``{"L2": 50 * 2**20}``.

    Raises:
        ValueError: no series, lengths that differ, values that a log axis cannot show, an unknown scale.
    """
    if not series:
        raise ValueError("sweep needs at least one series")
    for name, kind in (("xscale", xscale), ("yscale", yscale)):
        if kind not in ("linear", "log", "log2"):
            raise ValueError(f'{name} must be "linear", "log" or "log2", got {kind!r}')
    curves = [(s, np.asarray(x if s.x is None else s.x, float), np.asarray(s.y, float)) for s in series]
    for s, xs, ys in curves:
        if len(xs) != len(ys):
            raise ValueError(f"{s.label!r} has {len(ys)} values for {len(xs)} points of x")
        for kind, values, axis in ((xscale, xs, "x"), (yscale, ys, "y")):
            if kind != "linear" and (values <= 0).any():
                raise ValueError(f"{s.label!r}: a log {axis} axis needs positive values, got {values.min():g}")
    fig, ax = figure(title, subtitle=subtitle, height=height)
    for axis, kind in (("x", xscale), ("y", yscale)):
        if kind != "linear":
            getattr(ax, f"set_{axis}scale")("log", base=2 if kind == "log2" else 10)
    for s, xs, ys in curves:
        _draw(ax, s, xs, ys)
    _frame(ax, curves, limits or {}, xscale, yscale)
    binary = xscale == "log2" and x_unit == "B"
    _x_axis(ax, x_unit, xlabel, xscale, binary, curves)
    quantity_axis(ax.yaxis, y_unit, ylabel)
    notes = _name_marks(ax, marks or {})
    _name_lines(ax, curves, limits or {}, notes)
    fig.alt = _alt(title, curves, xlabel, x_unit, ylabel, y_unit, binary)
    return fig


def _name_marks(ax: Axes, marks: Mapping[str, float]) -> list[Annotation]:
    """Draw vertical lines, each with its label at the top: lower, or across others, only where nothing else fits."""
    width, height = 72 * _AXES, ax.get_ylim()[0]
    to_share = ax.transScale + ax.transLimits
    at = {label: width * to_share.transform((value, height))[0] for label, value in marks.items()}
    ways = [(across, row, side) for across in (False, True) for row in range(len(marks)) for side in (1, -1)]
    taken, notes = [], []
    for label, x in sorted(at.items(), key=lambda item: item[1]):
        long = 0.55 * SMALL * len(label) + 3
        for across, row, side in ways:  # the last one stands where none fits
            low, high = sorted((x, x + side * long))
            free = not any(r == row and low < b and a < high for r, a, b in taken)
            if free and low >= 0 and high <= width and (across or not any(low < other < high for other in at.values())):
                break
        taken.append((row, low, high))
        ax.axvline(marks[label], color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        note = ax.annotate(
            label, (marks[label], 1), (3 * side, -3 - 11 * row), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="top", ha="left" if side > 0 else "right", size=SMALL, color=MUTED,
        )  # fmt: skip
        note.set_in_layout(False)
        notes.append(note)
    return notes


def _draw(ax: Axes, s: Series, xs: np.ndarray, ys: np.ndarray) -> None:
    width, line, marker, _ = _STYLES[s.kind]
    colour = LIMIT if s.kind == "model" else s.colour
    if s.low is not None:
        ax.fill_between(xs, s.low, s.high, color=mix(s.colour, 0.22), linewidth=0, zorder=1.5)
    marker = marker if s.markers and len(xs) <= 40 else ""
    ax.plot(xs, ys, color=colour, linewidth=width, linestyle=line, marker=marker, ms=3.6, zorder=3 + (s.kind == "live"))


def _frame(ax: Axes, curves: Sequence, limits: Mapping[str, float], xscale: str, yscale: str) -> None:
    xs = np.concatenate([c[1] for c in curves])
    ys = np.concatenate([c[2] for c in curves] + [np.array(list(limits.values()), float)])
    ax.set_xlim(*_span(xs, xscale, 0.02))
    low, high = _span(ys, yscale, 0.08)
    ax.set_ylim(0 if yscale == "linear" and ys.min() >= 0 else low, high)


def _span(values: np.ndarray, kind: str, pad: float) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if kind == "linear":
        room = pad * (high - low or abs(high) or 1)
        return low - room, high + room
    room = (high / low) ** pad if high > low else 1.5
    return low / room, high * room


def _x_axis(ax: Axes, unit: str, name: str, kind: str, binary: bool, curves: Sequence) -> None:
    if kind != "log2" or binary:
        return quantity_axis(ax.xaxis, unit, name, binary=binary)
    low, high = ax.get_xlim()
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    longest = max((len(quantity(2**p if p >= 0 else 2.0**p)) for p in powers), default=1)
    step = max(1, math.ceil(len(powers) * (0.62 * SMALL * longest + 4) / (72 * _AXES)))
    shown = powers[::step]
    ax.set_xticks([2.0**p for p in shown], [quantity(2**p if p >= 0 else 2.0**p) for p in shown])
    ax.minorticks_off()
    ax.set_xlabel(f"{name} ({unit})" if unit else name)
    return None


def _name_lines(ax: Axes, curves: Sequence, limits: Mapping[str, float], notes: Sequence[Annotation]) -> None:
    """Write each curve's label to the right of its last point, spread so that none overlap.

    Curves that meet at the right would be hard to tell apart there; they are named where they are furthest apart.
    These names keep clear of ``notes``, the labels of the vertical marks, and of the marks.
    """
    inside = _where_apart(ax, curves)
    inks = [LIMIT if s.kind == "model" else s.colour for s, _, _ in curves]
    lines = [(xs, ys) for _, xs, ys in curves] + [(ax.get_xlim(), (value, value)) for value in limits.values()]
    lines += [((note.xy[0],) * 2, ax.get_ylim()) for note in notes]
    entries = []
    for k, (s, xs, ys) in enumerate(curves):
        if k in inside:
            continue
        colour = inks[k]
        entries.append(("\n".join(textwrap.wrap(s.label, 20)), ys[np.argmax(xs)], colour, _STYLES[s.kind][3]))
    for label, value in limits.items():
        ax.axhline(value, color=LIMIT, linewidth=1.0, zorder=2)
        entries.append(("\n".join(textwrap.wrap(label, 20)), value, LIMIT, "normal"))
    _name_ends(ax, entries)
    if inside:
        ax.figure.draw_without_rendering()  # settles where the notes are
        label_points(
            ax, list(inside.values()), [curves[k][0].label for k in inside], avoid=lines,
            colours=[ink(inks[k]) for k in inside], keep_clear=[note.get_window_extent() for note in notes],
        )  # fmt: skip


def _name_ends(ax: Axes, entries: Sequence[tuple[str, float, str, str]]) -> None:
    """Write texts (text, its height in data, colour, weight) right of the axes, spread so that none overlap."""
    if not entries:
        return
    fig = ax.figure
    fig.draw_without_rendering()
    frame = ax.get_window_extent()
    pixel = fig.dpi / 72
    heights = [(1 + text.count("\n")) * SMALL * 1.25 * pixel for text, *_ in entries]
    wanted = [ax.transData.transform((ax.get_xlim()[0], value))[1] for _, value, _, _ in entries]
    placed = spread(wanted, max(heights), frame.y0, frame.y1)
    for (text, _, colour, weight), y in zip(entries, placed, strict=True):
        ax.annotate(
            text, (1, (y - frame.y0) / frame.height), (6, 0), xycoords="axes fraction", textcoords="offset points",
            va="center", size=SMALL, color=ink(colour), weight=weight, linespacing=1.1,
        )  # fmt: skip


def _where_apart(ax: Axes, curves: Sequence) -> dict[int, tuple[float, float]]:
    """Index -> point for the curves whose end nearly touches another's: the point where the others are furthest."""
    pixel = ax.figure.dpi / 72
    paths = [ax.transData.transform(np.column_stack([xs, ys])[np.argsort(xs)]) for _, xs, ys in curves]
    found = {}
    for k, path in enumerate(paths):
        others = [p for i, p in enumerate(paths) if i != k]
        if not any(np.hypot(*(path[-1] - p[-1])) < 7 * pixel for p in others):
            continue
        gaps = np.min([abs(path[:, 1] - np.interp(path[:, 0], p[:, 0], p[:, 1])) for p in others], axis=0)
        best = int(np.argmax(gaps))
        if gaps[best] > 24 * pixel:
            found[k] = tuple(ax.transData.inverted().transform(path[best]))
    return found


def _alt(title: str, curves: Sequence, xlabel: str, x_unit: str, ylabel: str, y_unit: str, binary: bool) -> str:
    from utils.plots.ticks import binary_bytes

    def at(value: float) -> str:
        return binary_bytes(value) if binary else quantity(int(value) if value == int(value) else value, x_unit, 4)

    text = f"{title.rstrip('.')}. {ylabel} over {xlabel}."
    for s, xs, ys in curves:
        first, last = np.argmin(xs), np.argmax(xs)
        text += (
            f" {s.label}: {quantity(float(ys[first]), y_unit, 3)} at {at(xs[first])}, "
            f"{quantity(float(ys[last]), y_unit, 3)} at {at(xs[last])}."
        )
    return text
