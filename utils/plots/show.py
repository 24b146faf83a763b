"""Putting a figure on the page: a small opaque PNG that always carries alternative text, and its outlines as SVG."""

from __future__ import annotations

import base64
import gzip
import io
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from utils.plots.style import DPI, ON_A_PAGE

SHORTEST_ALT = 20
#: A stored figure has the same plain text on every machine; its pixels are not compared.
PLAIN = "<figure>"
#: A figure of more bytes as SVG, one of very many marks, is shown as PNG everywhere.
LARGEST_SVG = 400_000


@dataclass(frozen=True)
class Animation:
    """An animation that a notebook shows when it is a cell's last value, or through :func:`show`."""

    html: str = field(repr=False)
    poster: bytes = field(repr=False)
    alt: str

    def __repr__(self) -> str:
        return "<animation>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        data = {"text/html": self.html, "image/png": base64.b64encode(self.poster).decode(), "text/plain": repr(self)}
        return data, {"image/png": {"alt": self.alt}}


def checked_alt(alt: Any) -> str:
    """``alt`` on one line; ValueError when it is too short to replace the picture for someone who cannot see it."""
    if not isinstance(alt, str):
        raise TypeError(f"alt must be a string that says what the figure shows, got {alt!r}")
    text = " ".join(alt.split())
    if len(text) < SHORTEST_ALT:
        raise ValueError(f"alt must say what the figure shows in at least {SHORTEST_ALT} characters, got {alt!r}")
    return text


def palette_of(image: Image.Image, colours: int = 256) -> Image.Image:
    """``image`` (RGB) with at most ``colours`` colours; flat areas keep theirs exactly, so that white stays white."""
    reduced = image.quantize(colors=colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    pixels = np.asarray(image, np.int64).reshape(-1, 3) @ np.array([1 << 16, 1 << 8, 1])
    pairs, counts = np.unique((np.asarray(reduced, np.int64).reshape(-1) << 24) | pixels, return_counts=True)
    palette = reduced.getpalette()
    for pair in pairs[np.argsort(counts, kind="stable")]:  # the commonest colour of an entry comes last and wins
        entry, colour = int(pair) >> 24, int(pair) & 0xFFFFFF
        palette[3 * entry : 3 * entry + 3] = [colour >> 16, (colour >> 8) & 255, colour & 255]
    reduced.putpalette(palette)
    return reduced


def png(fig: Figure) -> bytes:
    """The figure as PNG: 1036 pixels wide, opaque, at most 256 colours, the same bytes on each call."""
    if fig.get_layout_engine() is not None:
        fig.draw_without_rendering()
        fig.set_layout_engine("none")  # each pass would move the axes by another fraction of a pixel
    raw = io.BytesIO()
    fig.savefig(raw, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    raw.seek(0)
    image = palette_of(Image.open(raw).convert("RGB"))
    small = io.BytesIO()
    image.save(small, format="PNG", optimize=True, dpi=(DPI, DPI))
    return small.getvalue()


def svg(fig: Figure) -> bytes:
    """The figure as SVG, letters as outlines so that it looks alike on every machine; the same bytes on each call."""
    raw = io.BytesIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "figure"}):
        fig.savefig(raw, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return raw.getvalue()


def show(fig: Figure | Animation, alt: str | None = None) -> None:
    """Display a figure in the notebook, with alternative text, and release it; or display an animation.

    A notebook shows the PNG: JupyterLab gives an SVG no alternative text, and shows none before a notebook is trusted.
    The website shows the SVG, which the output's metadata hold (``svgz``: gzip, base64).

    Args:
        fig: a matplotlib figure, best from :func:`utils.plots.figure` or one of the drawers, or an animation.
        alt: what the figure shows, for those who cannot see it; by default what the drawer wrote from its data.

    Raises:
        TypeError: ``fig`` is not a figure or ``alt`` is not a string.
        ValueError: there is no alternative text, or it is too short to be one.
    """
    if isinstance(fig, Animation):
        return display(*fig._repr_mimebundle_())
    if not isinstance(fig, Figure):
        raise TypeError(f"show takes a matplotlib figure, got {type(fig).__name__}")
    text = checked_alt(getattr(fig, "alt", "") if alt is None else alt)
    about = {"alt": text, "width": ON_A_PAGE}
    encoded, drawn = base64.b64encode(png(fig)).decode(), svg(fig)
    close(fig)
    if len(drawn) <= LARGEST_SVG:
        about["svgz"] = base64.b64encode(gzip.compress(drawn, mtime=0)).decode()
    return display({"image/png": encoded, "text/plain": PLAIN}, {"image/png": about})


def close(fig: Figure) -> None:
    """Release a figure; also takes it from pyplot's list when it was made there, so that it is not shown twice."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(fig)
    fig.clear()


def display(data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """Publish one output to the notebook; outside of one, do nothing."""
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython
    from IPython.display import display as publish

    if get_ipython() is not None:
        publish(data, metadata=metadata or {}, raw=True)
