"""Formats of 8 and 4 bits: the numbers that they hold, and what rounding to them costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from utils.plots.check import require_between, require_entries, require_known, require_positive, require_same_length
from utils.plots.labels import label_points, spread
from utils.plots.style import ARITHMETIC, INK, SMALL, figure, ink, mix, styled
from utils.units import number

#: Colour and line of each format: floats are blue, integers grey; 8 bits are solid, 4 bits dashed, block formats dark.
LOOKS = {
    "e4m3": (ARITHMETIC, "-"),
    "e5m2": (mix(ARITHMETIC, 0.55), "-"),
    "e2m1": (ARITHMETIC, (0, (4, 2))),
    "int8": ("#8A8A8A", "-"),
    "int4": ("#8A8A8A", (0, (4, 2))),
    "mxfp8": (INK, "-"),
    "mxfp4": (INK, (0, (4, 2))),
    "nvfp4": (INK, (0, (1, 1))),
}


@styled
def format_grids(grids: Mapping[str, Sequence[float]], *, title: str, subtitle: str = "") -> Figure:
    """Every positive number of each format as a stroke, the formats in rows over one axis.

    Args:
        grids: format -> its numbers, as :func:`utils.formats.grid` gives them; those above 0 are drawn.

    Raises:
        ValueError: no formats, an unknown one, or one without a number above 0.
    """
    require_known("format", grids, LOOKS)
    positive = {name: np.array([v for v in map(float, values) if v > 0]) for name, values in grids.items()}
    for name, values in positive.items():
        require_entries(f"{name}: numbers above 0", values)
    fig, ax = figure(title, subtitle=subtitle, height=0.75 + 0.42 * len(grids), grid="x")
    ax.set_xscale("log", base=2)
    low, high = min(v.min() for v in positive.values()), max(v.max() for v in positive.values())
    ax.set_xlim(low / 1.8, high * 1.8)
    for y, (name, values) in enumerate(positive.items()):
        ax.vlines(values, y - 0.3, y + 0.3, color=LOOKS[name][0], linewidth=0.7)
    ax.set_yticks(
        range(len(positive)), [f"{name}: {len(values)} above 0" for name, values in positive.items()], color=INK
    )
    ax.set_ylim(len(positive) - 0.5, -0.5)
    _powers_of_two(ax)
    ax.set_xlabel("number")
    said = "; ".join(
        f"{name}: {len(values)} numbers from {number(values.min(), 3)} to {number(values.max(), 5)}"
        for name, values in positive.items()
    )
    fig.alt = f"{title.rstrip('.')}. The positive numbers of each format on a logarithmic axis. {said}."
    return fig


@styled
def error_over_magnitude(
    errors: Mapping[str, Sequence[float]], magnitudes: Sequence[float], *, title: str, subtitle: str = ""
) -> Figure:
    """Relative error of rounding over the magnitude of the number, one curve per format.

    Args:
        errors: format -> relative error at each magnitude, as :func:`utils.formats.rounding_error` gives it.
        magnitudes: (P,) positive, ascending.

    Raises:
        ValueError: no formats, an unknown one, lengths that differ, or numbers that are not positive.
    """
    require_known("format", errors, LOOKS)
    xs = np.asarray([float(m) for m in magnitudes])
    require_positive("magnitudes", xs)
    curves = {name: np.asarray([float(e) for e in values]) for name, values in errors.items()}
    for name, values in curves.items():
        require_same_length(f"magnitudes and errors of {name}", xs, values)
        require_positive(f"errors of {name}", values)
    fig, ax = figure(title, subtitle=subtitle, height=3.5)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    for name, values in curves.items():
        colour, line = LOOKS[name]
        ax.plot(xs, values, color=colour, linestyle=line, linewidth=1.9)
    ax.set_xlim(xs[0], xs[-1])
    ax.set_ylim(0.6 * min(v.min() for v in curves.values()), 1.6)
    _powers_of_two(ax)
    ax.set_xlabel("magnitude of the number, without a scale")
    ax.set_ylabel("error / number (root mean square)")
    _percent(ax.yaxis)
    best = {name: int(np.median(np.flatnonzero(values <= 1.1 * values.min()))) for name, values in curves.items()}
    label_points(
        ax, [(xs[k], curves[name][k]) for name, k in best.items()], list(curves),
        colours=[_of_name(name) for name in curves], avoid=[(xs, v) for v in curves.values()],
    )  # fmt: skip
    said = "; ".join(
        f"{name}: smallest error {100 * values.min():.2g} %, {_good(xs[values <= 0.1])}"
        for name, values in curves.items()
    )
    fig.alt = f"{title.rstrip('.')}. {said}."
    return fig


@styled
def error_over_granularity(
    errors: Mapping[str, Mapping[str, Sequence[float]]], *, title: str, subtitle: str = ""
) -> Figure:
    """Relative error of whole matrices over how many numbers share a scale: median, and band from least to most.

    Args:
        errors: format -> granularity ("tensor", "row", "128", ...) -> error of each matrix, as
            :func:`utils.formats.quantization_error` gives it. Granularities are drawn in the order in which they first
            appear; a format with one of them is a point.

    Raises:
        ValueError: no formats, an unknown one, no errors, or an error that is not between 0 and 1.
    """
    require_known("format", errors, LOOKS)
    for name, row in errors.items():
        require_entries(name, row)
        for where, values in row.items():
            require_entries(f"{name}, {where}", values)
            require_between(f"error of {name}, {where}", values, 0, 1)
    places = list(dict.fromkeys(where for row in errors.values() for where in row))
    fig, ax = figure(title, subtitle=subtitle, height=3.9)
    ax.set_yscale("log")
    said, ends = [], []
    for name, row in errors.items():
        colour, line = LOOKS[name]
        xs = [places.index(where) for where in row]
        middle = [float(np.median(values)) for values in row.values()]
        low, high = ([float(f(values)) for values in row.values()] for f in (np.min, np.max))
        if len(xs) == 1:
            ax.vlines(xs, low, high, color=colour, linewidth=1.2)
            ax.plot(xs, middle, "D", color=colour, markersize=5, zorder=4)
        else:
            ax.fill_between(xs, low, high, color=mix(colour, 0.18), linewidth=0, zorder=1)
            ax.plot(xs, middle, color=colour, linestyle=line, linewidth=1.9, marker="o", markersize=3.6, zorder=3)
        ends.append((name, xs[-1], middle[-1]))
        said.append(f"{name}: " + ", ".join(f"{w} {100 * m:.2g} %" for w, m in zip(row, middle, strict=True)))
    ax.set_xlim(-0.2, len(places) - 0.8)
    ax.set_xticks(range(len(places)), places)
    ax.set_xlabel("numbers that share a scale")
    ax.set_ylabel("error / matrix (norms)")
    _percent(ax.yaxis)
    _name_ends(ax, ends)
    fig.alt = f"{title.rstrip('.')}. Median error of the matrices: {'; '.join(said)}."
    return fig


def _of_name(format: str) -> str:
    """Colour of a format's name: a little darker than its line."""
    return ink(LOOKS[format][0])


def _powers_of_two(ax: Axes) -> None:
    """Ticks at every fourth power of two."""
    low, high = ax.get_xlim()
    powers = [p for p in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1) if p % 4 == 0]
    ax.set_xticks([2.0**p for p in powers], ["1" if p == 0 else f"$2^{{{p}}}$" for p in powers])
    ax.minorticks_off()


def _good(xs: np.ndarray) -> str:
    """Where a curve is at most 10 %, in words."""
    return f"at most 10 % from {number(xs[0], 2)} to {number(xs[-1], 2)}" if len(xs) else "above 10 % everywhere"


def _percent(axis: Axis) -> None:
    """Ticks of a logarithmic axis at 1, 2 and 5 times each power of ten, in per cent."""
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axis.set_minor_formatter(NullFormatter())


def _name_ends(ax: Axes, ends: Sequence[tuple[str, int, float]]) -> None:
    """Names of lines that reach the right edge stand beside it, those of others beside their last point."""
    fig = ax.figure
    fig.draw_without_rendering()
    frame, pixel = ax.get_window_extent(), fig.dpi / 72
    last = max(x for _, x, _ in ends)
    right = [(name, ax.transData.transform((x, y))[1]) for name, x, y in ends if x == last]
    placed = spread([y for _, y in right], 1.3 * SMALL * pixel, frame.y0, frame.y1)
    for (name, _), y in zip(right, placed, strict=True):
        ax.annotate(
            name, (1, (y - frame.y0) / frame.height), (6, 0), xycoords="axes fraction", textcoords="offset points",
            va="center", size=SMALL, color=_of_name(name),
        )  # fmt: skip
    inner = [(name, x, y) for name, x, y in ends if x != last]
    label_points(
        ax, [(x, y) for _, x, y in inner], [name for name, _, _ in inner],
        colours=[_of_name(name) for name, _, _ in inner],
    )  # fmt: skip
