"""A notebook's cells as the site shows them: figures as files, side by side what two machines give."""

from __future__ import annotations

import base64
import gzip
import html
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from utils.claims import MIME
from website import explorers

#: How a line begins that a cell prints for an equation that it checked by numbers.
_CHECKED = "✓ "
#: Of more lines than this a printed text is taken for a table or a drawing.
MOST_LINES = 4
#: Words for which a figure must stay as it was drawn: where lightness is turned round, "pale" would be wrong.
_SHADES = re.compile(r"\b(?:(?:dark|light|bright|faint)(?:er|est)?|pale[rst]*)\b|\b(?:shaded|black)\b", re.IGNORECASE)
#: Functions of utils.plots that put such a word into the figure themselves.
_SHADED = re.compile(r"\b(?:causal_tile_map|pipeline_timeline|sm_waves)\(")
#: Cells of a table whose text is short, and long.
_SHORT = re.compile(r'(<td style=")(?=[^"]*">[^<]{1,12}</td>)')
_LONG = re.compile(r'(<td style=")(?=[^"]*">[^<]{20,}</td>)')
#: A living figure as `utils.living.show` writes it; on the site its scripts are files that its pages share.
_LIVING = re.compile(
    r'<figure [^>]*data-living="(?P<name>\w+)" data-settings="(?P<settings>[^"]*)"[^>]*>(?P<still><img [^>]*>)</figure>'
)


def names_a_shade(*texts: str) -> bool:
    """Whether the code of a figure or the text around it speaks of dark and light."""
    return any(_SHADES.search(text) or _SHADED.search(text) for text in texts)


class Figures:
    """Writes the figures of one page as files and gives the HTML that shows them.

    Args:
        folder: Where the files go.
        url: The folder's address as the page sees it.
        prefix: Start of the files' names, of its own for each page.

    Attributes:
        as_drawn: Whether the next figures keep their light and dark on a dark page.
    """

    def __init__(self, folder: Path, url: str, prefix: str) -> None:
        self.folder, self.url, self.prefix, self.made = folder, url, prefix, 0
        self.as_drawn = False

    @property
    def kind(self) -> str:
        """The CSS classes of the next figure."""
        return "course-figure course-as-drawn" if self.as_drawn else "course-figure"

    def show(self, data: bytes, alt: str, width: int | None = None, svg: bytes | None = None) -> str:
        """The HTML of a PNG figure, shown as ``svg`` where that is given; ValueError if it has no alternative text."""
        if not alt.strip():
            raise ValueError(f"figure {self.made + 1} of {self.prefix} has no alternative text")
        self.made += 1
        name = f"{self.prefix}-{self.made:02}.{'svg' if svg else 'png'}"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(svg or data)
        if data[:8] != b"\x89PNG\r\n\x1a\n":
            raise ValueError("not a PNG file")
        across, down = struct.unpack(">II", data[16:24])
        shown = min(width or across, across)
        return (
            f'<div class="course-scroll"><img class="{self.kind}" style="--drawn: {shown}px" src="{self.url}/{name}" '
            f'alt="{html.escape(alt, quote=True)}" width="{shown}" height="{round(down * shown / across)}" '
            'loading="lazy" decoding="async"></div>'
        )


def as_html(output: dict[str, Any], figures: Figures) -> str | None:
    """An output of a cell as HTML, or None where its text says nothing (the repr of a figure that is shown already)."""
    data = output.get("data", {})
    if "text/html" in data:
        markup = "".join(data["text/html"])
        if living := _LIVING.search(markup):
            return explorers.markup(living["name"], "../_static/living", living["settings"], living["still"])
        if any("claim+json" in kind for kind in data):
            return re.sub(r' style="[^"]*"', "", markup).replace("<details>", '<details class="course-claim">', 1)
        return table_box(markup).replace("<figure data-mlf", f'<figure class="{figures.kind}" data-mlf')
    if "image/png" in data:
        about = output.get("metadata", {}).get("image/png", {})
        image = base64.b64decode("".join(data["image/png"]))
        svg = gzip.decompress(base64.b64decode(about["svgz"])) if "svgz" in about else None
        return figures.show(image, about.get("alt", ""), about.get("width"), svg)
    text = "".join(data.get("text/plain", ""))
    return text_block(text) if text else None


def text_block(text: str) -> str:
    """Printed text; on a phone a few lines without columns go on below where they would leave it."""
    text = text.rstrip()
    lines = "" if text.count("\n") >= MOST_LINES or re.search(r"\S(?:  |\t)", text) else " course-lines"
    return f'<pre class="course-text{lines}" tabindex="0">{html.escape(text)}</pre>'


def table_box(markup: str) -> str:
    """HTML of an output; a table gets a box of its own that scrolls when the page is narrower than it.

    A short text stays on one line ("64 x 64"), and a long one has room for some words.
    """
    if not markup.lstrip().startswith("<table"):
        return markup
    markup = _SHORT.sub(r"\1white-space:nowrap;", markup)
    markup = _LONG.sub(r"\1min-width:7.5rem;", markup)
    caption = re.search(r"<caption[^>]*>(.*?)</caption>", markup, re.S)
    label = re.sub(r"<[^>]+>", "", caption[1]).strip() if caption else "Table"
    return f'<div class="course-scroll" tabindex="0" role="region" aria-label="{label}">{markup}</div>'


def all_html(outputs: Sequence[dict[str, Any]], figures: Figures) -> str:
    """A cell's outputs as HTML, "" if they say nothing; all that it checked is one line below them, which opens."""
    parts, checked = [], []
    for output in outputs:
        if output["output_type"] == "stream":
            lines = "".join(output["text"]).splitlines()
            checked += [
                f'<p class="course-claim">{html.escape(line)}</p>' for line in lines if line.startswith(_CHECKED)
            ]
            text = "\n".join(line for line in lines if not line.startswith(_CHECKED))
            parts += [text_block(text)] if text.strip() else []
        elif part := as_html(output, figures):
            (checked if MIME in output.get("data", {}) else parts).append(part)
    if len(checked) > 1:
        summary = f'<summary><span class="course-holds">✓</span> {len(checked)} results checked</summary>'
        checked = [f'<details class="course-claims">{summary}', *checked, "</details>"]
    return "\n".join([*parts, *checked])


def tabs(sides: Iterable[tuple[str, str]], group: str) -> str:
    """HTML side by side behind tabs, as MyST for sphinx-design; the choice holds for all tabs of the group."""
    parts = ["::::{tab-set}"]
    for name, content in sides:
        parts += [
            f":::{{tab-item}} {name}",
            f":sync: {group}-{len(parts)}",
            "",
            f"```{{raw}} html\n{content}\n```",
            ":::",
        ]
    return "\n".join([*parts, "::::"])
