"""What tests read off a figure or an animation of the course."""

import io
import json

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from utils import plots
from utils.plots import style


def picture_of(fig: Figure) -> Image.Image:
    """The figure as a picture, which must be as wide as the course's pages."""
    image = Image.open(io.BytesIO(plots.png(fig)))
    assert image.width == int(style.WIDTH * style.DPI)
    return image


def pixels_of(png: bytes, colour: str, within: int = 12) -> int:
    """Pixels of a PNG file that are nearly of a colour."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    return (abs(pixels - [int(colour[k : k + 2], 16) for k in (1, 3, 5)]).max(-1) < within).sum()


def boxes(ax: Axes, colour: str) -> list[tuple[float, float, float]]:
    """(x, middle in y, width) of the rectangles of a colour."""
    wanted = tuple(int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    found = (p for p in ax.patches if isinstance(p, Rectangle) and np.allclose(p.get_facecolor()[:3], wanted))
    return [(p.get_x(), p.get_y() + p.get_height() / 2, p.get_width()) for p in found]


def player_data(made: plots.Animation) -> dict:
    """What the player of an animation is called with."""
    start = made.html.index('({"kind"') + 1
    return json.JSONDecoder().raw_decode(made.html[start:].replace("<\\/", "</"))[0]
