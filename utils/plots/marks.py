"""Boxes and the texts in them."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from utils.plots.style import INK, SMALL


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
