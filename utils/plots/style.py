"""The one look of the course: colours with a fixed meaning, and figures with a takeaway as title.

Colours are Okabe and Ito's palette, which readers with any common colour blindness tell apart. Figures have an
opaque white ground, so that they read in a dark page too, and use a font that ships with matplotlib, so that every
machine draws the same. They are narrow for their letters: on a phone, 360 pixels
wide, the smallest letters, of 8.5 points, are still 7.6 pixels high.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from utils.plots.check import require_data

ARITHMETIC = "#0072B2"
#: Repeated in website/static/home.css, utils/living/living.css and tests/test_plots.py; named in notebooks/README.md.
HBM = "#D55E00"
ON_CHIP = "#009E73"
LINK = "#CC79A7"
WASTE = "#C9C9C9"
LIMIT = "#000000"
WRONG = "#E69F00"
#: Text, secondary text, grid.
INK, MUTED, GRID = "#222222", "#5F5F5F", "#E4E4E4"
#: Where nothing is done.
IDLE = "#e7e7e7"
#: Hatches: a wrong result, and waste that must be seen beside a pale colour.
WRONG_HATCH, WASTE_HATCH = "xxx", "////"

WIDTH = 5.6  # inches
DPI = 185
#: Pixels that a figure takes where the page is wide enough.
ON_A_PAGE = 640
SMALL, TEXT, TITLE = 8.5, 9.5, 11.5  # points

RC = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    "text.color": INK,
    "axes.edgecolor": "#8A8A8A",
    "axes.labelcolor": MUTED,
    "axes.labelsize": TEXT,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "axes.prop_cycle": "cycler('color', ['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9'])",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
    "hatch.linewidth": 0.7,
    "hatch.color": "#8A8A8A",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": DPI,
    "mathtext.fontset": "dejavusans",
    "axes.unicode_minus": True,
    "path.simplify": True,
}

P = ParamSpec("P")
R = TypeVar("R")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function under the course's matplotlib settings, whatever the reader's own are.

    Its first argument is what it draws: ValueError where that is empty or holds NaN.
    """

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        require_data(draw.__name__, next(iter([*args, *kwargs.values()]), None))
        with rc_context(RC):
            return draw(*args, **kwargs)

    return wrapper


@styled
def figure(
    title: str,
    *,
    alt: str = "",
    subtitle: str = "",
    height: float = 3.4,
    rows: int = 1,
    columns: int = 1,
    width_ratios: Sequence[float] | None = None,
    height_ratios: Sequence[float] | None = None,
    sharex: bool = False,
    sharey: bool = False,
    grid: str = "both",
) -> tuple[Figure, Any]:
    """A figure in the course's look and its axes (one, or an array of ``rows`` x ``columns``).

    Args:
        title: the takeaway in one sentence, set at the left above the axes; long ones are wrapped.
        alt: alternative text for :func:`utils.plots.show`; it may also be given there.
        subtitle: smaller line below the title, such as a record's label.
        height: inches of the whole figure without the title.
        grid: "x", "y", "both" or "none".

    Raises:
        ValueError: an empty title or an impossible size.
    """
    if not isinstance(title, str) or not title.strip():
        raise ValueError(f"title must say what the figure shows in one sentence, got {title!r}")
    if not 0.5 <= height <= 12:
        raise ValueError(f"height must be between 0.5 and 12 inches, got {height}")
    title_lines = balanced(title, 56)
    subtitle_lines = balanced(subtitle, 86) if subtitle else []
    head = 0.10 + 0.205 * len(title_lines) + 0.165 * len(subtitle_lines) + 0.06
    total = height + head
    fig = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor="white")
    FigureCanvasAgg(fig)
    fig.set_layout_engine(
        "constrained", rect=(0, 0, 1, height / total), w_pad=0.06, h_pad=0.05, wspace=0.04, hspace=0.04
    )
    left = 0.06 / WIDTH
    y = 1 - 0.09 / total
    fig.text(left, y, "\n".join(title_lines), size=TITLE, weight="bold", va="top", linespacing=1.25).set_in_layout(
        False
    )
    if subtitle_lines:
        y -= (0.205 * len(title_lines) + 0.015) / total
        text = "\n".join(subtitle_lines)
        fig.text(left, y, text, size=SMALL, color=MUTED, va="top", linespacing=1.25).set_in_layout(False)
    ratios = {"width_ratios": width_ratios, "height_ratios": height_ratios}
    axes = fig.subplots(rows, columns, sharex=sharex, sharey=sharey, gridspec_kw=ratios)
    for ax in np.atleast_1d(axes).flat:
        tidy(ax, grid)
    fig.alt = alt
    fig.title = title
    return fig, axes


def balanced(text: str, width: int) -> list[str]:
    """Wrap ``text`` into as few lines as ``width`` characters allow, of about the same length: no lonely last word.

    A value stays with its name ("D = 64").
    """
    text = text.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")
    lines = textwrap.wrap(text, width)
    narrow = next(
        (w for w in range(len(text) // max(1, len(lines)), width) if len(textwrap.wrap(text, w)) == len(lines)), width
    )
    return textwrap.wrap(text, narrow) if lines else lines


def tidy(ax: Axes, grid: str = "both") -> Axes:
    """Take the box away, keep a light grid and quiet ticks."""
    if grid not in ("x", "y", "both", "none"):
        raise ValueError(f'grid must be "x", "y", "both" or "none", got {grid!r}')
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#8A8A8A")
    ax.tick_params(which="both", length=0, labelsize=SMALL, labelcolor=MUTED)
    ax.set_axisbelow(True)
    if grid != "none":
        ax.grid(True, axis=grid, color=GRID, linewidth=0.8)
    return ax


def bare(ax: Axes) -> Axes:
    """Axes without ticks, spines or grid, for diagrams."""
    ax.grid(False)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return ax


def mix(colour: str, share: float, ground: str = "#FFFFFF") -> str:
    """``colour`` mixed with ``ground``: share 1 is the colour itself, 0 the ground. Opaque everywhere."""
    from matplotlib.colors import to_hex, to_rgb

    return to_hex([share * c + (1 - share) * g for c, g in zip(to_rgb(colour), to_rgb(ground), strict=True)])


def ink(colour: str) -> str:
    """``colour`` for letters: darkened until it stands out on white 4.5 to 1, as WCAG 2.2 (1.4.3) asks of text."""
    shares = (share / 20 for share in range(17, 0, -1))
    return next(dark for share in shares if _luminance(dark := mix(colour, share, "#000000")) <= 1.05 / 4.5 - 0.05)


def _luminance(colour: str) -> float:
    """Relative luminance of a colour, from 0 to 1 (WCAG 2.2)."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
