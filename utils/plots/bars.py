"""Shares and sizes as bars: operator classes, memory by part, and the profiler held against hardware counters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from utils.plots.style import (
    ARITHMETIC,
    HBM,
    INK,
    LIMIT,
    LINK,
    MUTED,
    ON_CHIP,
    SMALL,
    TEXT,
    canvas,
    mix,
    styled,
)  # fmt: skip
from utils.plots.ticks import quantity_axis
from utils.units import number, quantity

#: Operator classes: contractions are arithmetic, the other two wait for memory.
CLASS_COLOURS = {"contraction": ARITHMETIC, "normalisation": HBM, "element-wise": mix(HBM, 0.5)}
_PARTS = (ARITHMETIC, HBM, ON_CHIP, LINK, mix(ARITHMETIC, 0.5), mix(HBM, 0.5), mix(ON_CHIP, 0.5), mix(LINK, 0.5))


def _checked(rows: Mapping[str, Mapping[str, float]], what: str) -> list[str]:
    """The parts of all rows in order; ValueError for no rows, a negative part or an empty sum."""
    if not rows:
        raise ValueError(f"{what} needs at least one row")
    for label, parts in rows.items():
        for part, value in parts.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{label!r}: {part!r} must be a finite number, not negative, got {value!r}")
        if not sum(parts.values()) > 0:
            raise ValueError(f"{label!r}: the parts add up to nothing")
    return list(dict.fromkeys(part for parts in rows.values() for part in parts))


@styled
def class_shares(
    rows: Mapping[str, Mapping[str, float]],
    *,
    totals: Mapping[str, str] | None = None,
    colours: Mapping[str, str] | None = None,
    title: str = "",
    subtitle: str = "",
    ax: Axes | None = None,
) -> Figure:
    """Draw how a whole divides into parts, one stacked bar of 100 % a row: FLOPs, time unfused, time fused.

    Args:
        rows: label -> part -> amount, in any unit of its own; each row is scaled to 100 %.
        totals: label -> what the whole row amounts to ("1.92 ms"), written at its right.
        colours: part -> colour; operator classes have theirs.

    Raises:
        ValueError: no rows, a negative amount, or a row that adds up to nothing.
    """
    parts = _checked(rows, "class_shares")
    palette = dict(zip(parts, _PARTS * len(parts))) | CLASS_COLOURS | dict(colours or {})
    title = title or "The parts of " + ", ".join(rows)
    fig, ax = canvas(title, ax, subtitle=subtitle, height=0.86 * len(rows) + 0.75, grid="x")
    said = []
    for y, (label, amounts) in enumerate(rows.items()):
        whole = sum(amounts.values())
        left, thin = 0.0, []
        for part in parts:
            share = 100 * amounts.get(part, 0.0) / whole
            ax.barh(y + 0.1, share, left=left, height=0.5, color=palette[part], edgecolor="white", linewidth=1.2)
            text = f"{number(share, 3)} %"
            if share > 9:
                ax.text(
                    left + share / 2, y + 0.1, text, ha="center", va="center", size=TEXT, weight="bold",
                    color=_readable(palette[part]),
                )  # fmt: skip
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
    _legend(ax, [(part, palette[part]) for part in parts])
    fig.alt = f"Stacked bars of 100 %. {'; '.join(said)}."
    return fig


def _readable(colour: str) -> str:
    """White or dark text, whichever stands out on ``colour``."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.62 else INK


def _name_thin(ax: Axes, y: float, thin: Sequence[tuple[float, str, str]]) -> None:
    """Name the slices that are too thin to hold a text, right of the row's label and joined to them by a hair line."""
    width = 1.08  # percent of the axis for a character of small text
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


def _legend(ax: Axes, entries: Sequence[tuple[str, str]]) -> None:
    handles = [ax.barh([0], [0], color=colour, label=label) for label, colour in entries]
    ax.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(-0.01, -0.13 if len(ax.patches) else 0), ncol=4,
        frameon=False, fontsize=SMALL, handlelength=1.0, handleheight=1.0, columnspacing=1.6, borderaxespad=0.4,
    )  # fmt: skip


@styled
def memory_bars(
    rows: Mapping[str, Mapping[str, float]],
    *,
    limit: tuple[float, str] | None = None,
    colours: Mapping[str, str] | None = None,
    title: str,
    subtitle: str = "",
    ax: Axes | None = None,
) -> Figure:
    """Draw bytes by part, one stacked bar a row on a common axis, with the memory that there is as a thin black line.

    Args:
        rows: label -> part -> bytes.
        limit: (bytes, label) of the line, such as ``(80e9, "H100 80 GB")``.
        colours: part -> colour; by default shades of the colour of HBM.

    Raises:
        ValueError: as :func:`class_shares`.
    """
    parts = _checked(rows, "memory_bars")
    shades = [mix(HBM, share) for share in np.linspace(1, 0.25, max(2, len(parts)))]
    palette = dict(zip(parts, shades)) | dict(colours or {})
    fig, ax = canvas(title, ax, subtitle=subtitle, height=0.72 * len(rows) + 0.95, grid="x")
    longest = max([sum(p.values()) for p in rows.values()] + ([limit[0]] if limit else []))
    said = []
    for y, (label, amounts) in enumerate(rows.items()):
        left = 0.0
        for part in parts:
            amount = amounts.get(part, 0.0)
            ax.barh(y + 0.1, amount, left=left, height=0.46, color=palette[part], edgecolor="white", linewidth=1.0)
            left += amount
        total = quantity(float(left), "B", 3)
        ax.annotate(total, (left, y + 0.1), (5, 0), textcoords="offset points", va="center", size=TEXT, weight="bold")
        ax.text(0, y - 0.17, label, size=TEXT, color=INK, va="bottom")
        said.append(
            f"{label}: {total}, of it " + ", ".join(f"{p} {quantity(float(a), 'B', 3)}" for p, a in amounts.items())
        )
    ax.set_xlim(0, longest * 1.02)
    ax.set_ylim(len(rows) - 0.55, -0.6)
    ax.set_yticks([])
    quantity_axis(ax.xaxis, "B", "memory")
    if limit:
        ax.axvline(limit[0], color=LIMIT, linewidth=1.1)
        ax.annotate(
            limit[1],
            (limit[0], -0.6),
            (-4, -2),
            textcoords="offset points",
            ha="right",
            va="top",
            size=SMALL,
            color=LIMIT,
        )
        said.append(f"limit: {limit[1]}")
    _legend(ax, [(part, palette[part]) for part in parts])
    fig.alt = f"Memory by part. {'; '.join(said)}."
    return fig


@dataclass(frozen=True)
class Truth:
    """One kernel: what the course's profiler ``counted`` and what the hardware's counters ``measured``, in one unit."""

    kernel: str
    counted: float
    measured: float
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("counted", "measured"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of {self.kernel!r} must be positive, got {getattr(self, name)!r}")

    @property
    def ratio(self) -> float:
        """Measured over counted: 1 means that the profiler is exact."""
        return self.measured / self.counted


@styled
def truth_table(
    rows: Sequence[Truth], *, unit: str = "sectors", title: str = "", subtitle: str = "", ax: Axes | None = None
) -> Figure:
    """Draw measured over counted for each kernel as a bar from 1 on a log axis, with both numbers beside it.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("truth_table needs at least one kernel")
    exact = sum(abs(row.ratio - 1) < 0.01 for row in rows)
    title = title or f"{exact} of {len(rows)} kernels agree with the hardware's counters within 1 %"
    subtitle = subtitle or f"{unit} that the hardware counted over {unit} that the profiler counted"
    fig, ax = canvas(title, ax, subtitle=subtitle, height=0.31 * len(rows) + 0.75, grid="x")
    ax.set_xscale("log")
    ratios = np.array([row.ratio for row in rows])
    low, high = min(ratios.min() / 1.15, 0.8), max(ratios.max() * 1.15, 1.25)
    said = []
    for y, row in enumerate(rows):
        near = abs(row.ratio - 1) < 0.01
        colour = HBM if near else mix(HBM, 0.55)
        ax.plot([1, row.ratio], [y, y], color=colour, linewidth=5, solid_capstyle="butt")
        ax.plot(row.ratio, y, "o", color=colour, ms=6.5)
        numbers = f"{number(row.measured)} / {number(row.counted)}"
        ax.annotate(
            f"{row.ratio:.3f}", (1, y), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", size=TEXT, weight="bold", color=INK,
        )  # fmt: skip
        ax.annotate(
            row.note or numbers, (1, y), (48, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", size=SMALL, color=MUTED,
        )  # fmt: skip
        said.append(f"{row.kernel}: {number(row.ratio, 3)} ({numbers}){', ' + row.note if row.note else ''}")
    ax.axvline(1, color=LIMIT, linewidth=1.0, zorder=1)
    ax.set_xlim(low, high)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_yticks(range(len(rows)), [row.kernel for row in rows], color=INK)
    marks = [m for m in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20) if low <= m <= high]
    ax.set_xticks(marks, [f"×{number(m)}" for m in marks])
    ax.minorticks_off()
    ax.set_xlabel("measured / counted")
    fig.alt = f"{unit} measured over counted for {len(rows)} kernels. {'; '.join(said)}."
    return fig
