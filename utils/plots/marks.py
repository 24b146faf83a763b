"""What drawings share: boxes, the texts in them, the lanes of a timeline, the heading of a panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from utils.plots.style import INK, MUTED, SMALL, TEXT, WIDTH


def box(
    ax: Axes, x: float, y: float, width: float, height: float, facecolor: str = "none", *, edgecolor: str = "none",
    **look: Any,
) -> None:  # fmt: skip
    """Add a rectangle with its lower corner at (x, y), without an edge unless one is named, in the axes' units."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=facecolor, edgecolor=edgecolor, **look))


def centred(ax: Axes, x: float, y: float, text: str, *, size: float = SMALL, color: str = INK, **look: Any) -> None:
    """Write a text around (x, y)."""
    ax.text(x, y, text, ha="center", va="center", size=size, color=color, **look)


def readable(colour: str) -> str:
    """White or dark text, whichever stands out on ``colour``."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.62 else INK


def lanes(ax: Axes, names: Sequence[str], end: float, *, start: float = 0.0, margin: float = 0.55) -> None:
    """Make the axes those of a timeline: a lane for each name from the top down, ``margin`` beyond the outer ones."""
    ax.set_xlim(start, end)
    ax.set_ylim(len(names) - 1 + margin, -margin)
    ax.set_yticks(range(len(names)), names, color=INK)
    ax.spines["bottom"].set_visible(False)


def heading(ax: Axes, name: str, said: str = "", pad: float = 4.0) -> None:
    """Write above a panel its name, and on the right what it shows, a line lower where both are too long for one."""
    if 0.65 * TEXT * len(name) + 0.55 * SMALL * len(said) > 72 * (WIDTH - 0.9):
        name += "\n"
    ax.set_title(name, loc="left", size=TEXT, weight="bold", color=INK, pad=pad)
    ax.set_title(said, loc="right", size=SMALL, color=MUTED, pad=pad)
