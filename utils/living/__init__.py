"""Living figures: vector drawings that compute while the reader drags, types and steps, in a notebook and on the site.

A figure is a file ``NAME.js`` beside this one. It declares its fields, a pure function ``compute`` with the course's
formulas, which a test holds against `utils`, and how its results are drawn. ``common.js``, ``plot.js``, ``units.js``
and ``formulas.js`` are what all of them share. Nothing is fetched from elsewhere. A viewer that strips scripts shows
a still.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from matplotlib.figure import Figure

from utils.living.tables import data
from utils.plots.show import Animation, png

FOLDER = Path(__file__).parent
#: What every figure loads before its own script, in this order.
LIBRARY = ("formulas.js", "units.js", "common.js", "plot.js")
#: Formulas that one figure alone needs, after the library.
_MORE = {"parallelism": ("schedules.js",)}
STYLE = "living.css"
#: The figures by name, with the parts of `data` that each needs.
FIGURES: Mapping[str, tuple[str, ...]] = {
    "roofline": ("devices", "elementSize", "kernels", "operators"),
    "memory": ("devices", "elementSize", "links", "models", "precisions", "shardedFrom", "stages"),
    "serving": ("devices", "elementSize", "models"),
    "online_softmax": (),
    "tiles": ("devices", "elementSize"),
    "parallelism": ("devices", "elementSize", "links"),
    "scheduler": (),
}


def files(name: str) -> tuple[str, ...]:
    """The scripts of a figure, in the order in which they are loaded."""
    return *LIBRARY, *_MORE.get(name, ()), f"{name}.js"


def script(name: str) -> str:
    """What a notebook needs for one figure: data, library and the figure itself; KeyError if there is no such one."""
    wanted = data()
    plain = json.dumps({key: wanted[key] for key in FIGURES[name]}, separators=(",", ":"), ensure_ascii=False)
    return "\n".join([f"globalThis.MLF_DATA = {{ ...globalThis.MLF_DATA, ...{plain} }};", *map(_short, files(name))])


@cache
def _short(file: str) -> str:
    """A file without indentation and whole-line comments."""
    kept, inside = [], False
    for line in map(str.strip, (FOLDER / file).read_text("utf-8").splitlines()):
        inside = inside or line.startswith("/*")
        if line and not inside and not line.startswith("//"):
            kept.append(line)
        inside = inside and "*/" not in line
    return "\n".join(kept)


def show(name: str, still: Animation | Figure, **settings: object) -> Animation:
    """A living figure, to be a cell's last value.

    Args:
        name: One of `FIGURES`.
        still: What is shown where scripts do not run: a figure or an animation of `utils.plots`, with its alternative
            text.
        settings: What the figure starts with, by the names of its fields.

    Raises:
        ValueError: There is no such figure.
    """
    if name not in FIGURES:
        raise ValueError(f"there is no living figure {name!r}; there are {', '.join(FIGURES)}")
    poster = still.poster if isinstance(still, Animation) else png(still)
    given = html.escape(json.dumps(settings, ensure_ascii=False, separators=(",", ":")))
    image = base64.b64encode(poster).decode()
    figure = (
        f'<figure class="mlf-explorer" data-living="{name}" data-settings="{given}" data-lm-suppress-shortcuts="true">'
        f'<img alt="{html.escape(still.alt)}" src="data:image/png;base64,{image}" '
        f'style="max-width:100%;height:auto;background:#FFFFFF"></figure>'
    )
    return Animation(figure + _sources(name), poster, still.alt)


def renewed(page: str) -> str:
    """HTML that `show` made, with the scripts and the style of today; other HTML as it is."""
    found = _STORED.match(page)
    return found["figure"] + _sources(found["name"]) if found else page


_STORED = re.compile(r'(?P<figure><figure [^>]*data-living="(?P<name>\w+)".*?</figure>)<style>', re.DOTALL)


def _sources(name: str) -> str:
    source = script(name).replace("</", "<\\/").replace("<!--", "<\\!--")
    return f"<style>{_style()}</style><script>{source}</script>"


@cache
def _style() -> str:
    return (FOLDER / STYLE).read_text("utf-8")
