"""Shares and sizes as bars: operator classes, memory by part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from utils.plots.check import require_positive
from utils.plots.labels import legend_below
from utils.plots.marks import centred, readable
from utils.plots.style import ARITHMETIC, HBM, INK, LIMIT, LINK, ON_CHIP, SMALL, TEXT, figure, mix, styled
from utils.plots.ticks import quantity_axis
from utils.units import number, quantity

#: Operator classes: contractions are arithmetic, the other two wait for memory.
CLASS_COLOURS = {"contraction": ARITHMETIC, "normalisation": HBM, "element-wise": mix(HBM, 0.5)}
_PARTS = (ARITHMETIC, HBM, ON_CHIP, LINK, mix(ARITHMETIC, 0.5), mix(HBM, 0.5), mix(ON_CHIP, 0.5), mix(LINK, 0.5))


def parts_of(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The parts of all rows in order; ValueError for a negative part or a row of nothing."""
    for label, parts in rows.items():
        for part, value in parts.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{label!r}: {part!r} must be a finite number, not negative, got {value!r}")
        require_positive(f"the sum of {label!r}", [sum(parts.values())])
    return list(dict.fromkeys(part for parts in rows.values() for part in parts))


@styled
def class_shares(
    rows: Mapping[str, Mapping[str, float]],
    *,
    totals: Mapping[str, str] | None = None,
    title: str = "",
    subtitle: str = "",
) -> Figure:
    """Draw how a whole divides into parts, one stacked bar of 100 % a row: FLOPs, time unfused, time fused.

    Args:
        rows: label -> part -> amount, in any unit of its own; each row is scaled to 100 %.
        totals: label -> what the whole row amounts to ("1.92 ms"), written at its right.
    """
    parts = parts_of(rows)
    palette = dict(zip(parts, _PARTS * len(parts))) | CLASS_COLOURS
    title = title or "The parts of " + ", ".join(rows)
    fig, ax = figure(title, subtitle=subtitle, height=0.86 * len(rows) + 0.75, grid="x")
    said = []
    for y, (label, amounts) in enumerate(rows.items()):
        whole = sum(amounts.values())
        left, thin = 0.0, []
        for part in parts:
            share = 100 * amounts.get(part, 0.0) / whole
            ax.barh(y + 0.1, share, left=left, height=0.5, color=palette[part], edgecolor="white", linewidth=1.2)
            text = f"{number(share, 3)} %"
            if share > 9:
                centred(ax, left + share / 2, y + 0.1, text, size=TEXT, weight="bold", color=readable(palette[part]))
            elif part in amounts:
                thin.append((left + share / 2, f"{part} {text}", palette[part]))
            left += share
        _name_thin(ax, y, thin)
        ax.text(0, y - 0.2, label, size=TEXT, weight="bold", color=INK, va="bottom")
        if totals and label in totals:
            ax.annotate(
                totals[label], (100, y + 0.1), (7, 0), textcoords="offset points", va="center", size=TEXT, color=INK
            )
        shares = (f"{part} {number(100 * amounts.get(part, 0.0) / whole, 3)} %" for part in parts)
        said.append(f"{label}: {', '.join(shares)}")
    ax.set_xlim(0, 100)
    ax.set_ylim(len(rows) - 0.5, -0.55)
    ax.set_yticks([])
    ax.set_xticks(range(0, 101, 20), [f"{t} %" for t in range(0, 101, 20)])
    legend_below(ax, [Patch(facecolor=palette[part], label=part) for part in parts])
    fig.alt = f"Stacked bars of 100 %. {'; '.join(said)}."
    return fig


def _name_thin(ax: Axes, y: float, thin: Sequence[tuple[float, str, str]]) -> None:
    """Name the slices that are too thin to hold a text, right of the row's label and joined to them by a hair line."""
    width = 1.4  # percent of the axis for a character of small text
    right = 100.0
    for x, text, colour in reversed(thin):
        half = len(text) * width / 2
        centre = min(max(x, half), right - half)
        ax.annotate(
            text, (x, y - 0.15), (centre, y - 0.2), ha="center", va="bottom", size=SMALL,
            color=mix(colour, 0.62, "#000000"),
        )  # fmt: skip
        ax.plot([x, x], [y - 0.2, y - 0.15], color=colour, linewidth=0.9)
        right = centre - half - 2


@styled
def memory_bars(
    rows: Mapping[str, Mapping[str, float]],
    *,
    marks: Mapping[str, tuple[float, str]] | None = None,
    name: str = "memory",
    title: str,
    subtitle: str = "",
) -> Figure:
    """Draw bytes by part, one stacked bar a row on a common axis; published figures as thin black lines.

    Args:
        rows: label -> part -> bytes.
        marks: label -> (bytes, text) of a line across that row's bar.
        name: what the bytes are.

    Raises:
        ValueError: a mark for a row that is not there.
    """
    parts, marks = parts_of(rows), marks or {}
    if unknown := set(marks) - set(rows):
        raise ValueError(f"a mark for {sorted(unknown)[0]!r}, which is no row")
    palette = dict(zip(parts, (mix(HBM, share) for share in np.linspace(1, 0.25, max(2, len(parts))))))
    fig, ax = figure(title, subtitle=subtitle, height=0.72 * len(rows) + 0.95, grid="x")
    longest = max([sum(p.values()) for p in rows.values()] + [value for value, _ in marks.values()])
    said = []
    for y, (label, amounts) in enumerate(rows.items()):
        left = 0.0
        for part in parts:
            amount = amounts.get(part, 0.0)
            ax.barh(y + 0.1, amount, left=left, height=0.46, color=palette[part], edgecolor="white", linewidth=1.0)
            left += amount
        end, text = left, quantity(float(left), "B", 3)
        if label in marks:
            value, words = marks[label]
            ax.plot([value, value], [y - 0.16, y + 0.36], color=LIMIT, linewidth=1.4)
            end, text = max(left, value), f"{text}  ({words} {quantity(float(value), 'B', 3)})"
        ax.annotate(text, (end, y + 0.1), (5, 0), textcoords="offset points", va="center", size=TEXT, weight="bold")
        ax.text(0, y - 0.17, label, size=TEXT, color=INK, va="bottom")
        said.append(
            f"{label}: {text}, of it " + ", ".join(f"{p} {quantity(float(a), 'B', 3)}" for p, a in amounts.items())
        )
    ax.set_xlim(0, longest * 1.02)
    ax.set_ylim(len(rows) - 0.55, -0.6)
    ax.set_yticks([])
    quantity_axis(ax.xaxis, "B", name)
    legend_below(ax, [Patch(facecolor=palette[part], label=part) for part in parts])
    fig.alt = f"{name[0].upper()}{name[1:]} by part. {'; '.join(said)}."
    return fig
