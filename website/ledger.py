"""The page of all claims: every figure that the course states, linked to the section of the notebook that makes it.

The claims are those of :func:`utils.claims.ledger`, read from the notebooks' stored outputs. Without JavaScript the
page is a table for each notebook; ``static/tables.js`` adds a filter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from utils.claims import KINDS, Claim, ledger
from utils.claims.page import in_one_unit, title
from website.places import lectures, page_of

_HEAD = """\
# Claims

Every figure that the course states is computed by the cell that states it, and held against what it should be. A cell
whose claim does not hold raises an error, and the tests execute every cell. This page is built from the notebooks'
stored outputs.

- <span class="kind kind-derive">derive</span>: computed or counted, the same on every machine
- <span class="kind kind-measure">measure</span>: a measurement on a GPU, held against a prediction or a published
  figure; see [the records](records/index.md)
- <span class="kind kind-state">state</span>: published by others, quoted with its source

A tolerance is relative to the expected value; *exact* means equal, for floating-point numbers up to rounding.
"""


@dataclass(frozen=True)
class Section:
    """A heading of a notebook: its text, the anchor that links lead to, and the cell that it stands in."""

    text: str
    slug: str
    cell: int


def write(source: Path) -> None:
    """Write ``claims.md`` into the folder of the site's sources."""
    (source / "claims.md").write_text(page(), encoding="utf-8")


def page() -> str:
    """The page of claims as MyST Markdown; LedgerError when the stored outputs cannot be read."""
    made = ledger()
    parts = [_HEAD, f"**{len(made)} claims**: {_kinds(made)}.\n"]
    for path in lectures():
        claims = [c for c in made if c.notebook == path.stem]
        if claims:
            link = f"[{markdown(title(path))}](/{page_of(path)}.ipynb)"
            parts += [f"## {title(path).split(':')[0]}\n", f"{link}: {_kinds(claims)}.\n", _table(claims)]
    parts.append(script("_static"))
    return "\n".join(parts)


def script(static: str) -> str:
    """The lines of HTML that give a page its tables' look and their filter; ``static`` leads to the static files."""
    return f'<link rel="stylesheet" href="{static}/tables.css">\n<script src="{static}/tables.js" defer></script>\n'


def markdown(text: str) -> str:
    """Plain text as Markdown: characters that mean something there are escaped, so that they show as they are."""
    return re.sub(r"([\\`*_{}\[\]<>|$&~^#])", r"\\\1", text)


@cache
def sections(path: Path) -> tuple[Section, ...]:
    """The headings of a notebook that links can lead to, in order, with the anchors that MyST gives them."""
    found: list[Section] = []
    slugs: set[str] = set()
    for index, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] != "markdown":
            continue
        without_code = re.sub(r"^(```|~~~).*?^\1", "", "".join(cell["source"]), flags=re.MULTILINE | re.DOTALL)
        # deeper headings get no anchor (myst_heading_anchors)
        for text in re.findall(r"^#{1,3} +(.+?)\s*$", without_code, re.MULTILINE):
            slug = _unique(_slug(text), slugs)
            slugs.add(slug)
            found.append(Section(text, slug, index))
    return tuple(found)


def section_of(path: Path, cell: int) -> Section:
    """The nearest heading above a cell of a notebook; the notebook's title when none is nearer."""
    return [section for section in sections(path) if section.cell <= cell][-1]


def _slug(heading: str) -> str:
    """GitHub's rule on what MyST sees of a heading: its text and code, without formulas and marks of emphasis."""
    seen = re.sub(r"\$[^$]+\$", "", heading)
    seen = re.sub(r"[*`]", "", seen)
    return re.sub(r"[^\w\- ]", "", seen.lower().replace(" ", "-"))


def _unique(slug: str, taken: set[str]) -> str:
    unique, number = slug, 1
    while unique in taken:
        unique, number = f"{slug}-{number}", number + 1
    return unique


def _kinds(claims: Sequence[Claim]) -> str:
    return ", ".join(f"{count} {kind}" for kind in KINDS if (count := sum(c.kind == kind for c in claims)))


def _table(claims: Sequence[Claim]) -> str:
    lines = [
        ":::{div} claims",
        "| claim | computed | expected, tolerance | unit | kind, source |",
        "|:---|---:|---:|:---|:---|",
        *map(_row, claims),
        ":::",
    ]
    return "\n".join(lines) + "\n"


def _row(c: Claim) -> str:
    computed, expected, unit = in_one_unit(c)
    path = next(path for path in lectures() if path.stem == c.notebook)
    section = section_of(path, c.cell)
    where = f"[{section.text}](/{page_of(path)}.ipynb#{section.slug})"
    breakable = re.sub(r"([._])", r"\1<wbr>", c.id)  # into lines, after a dot or an underscore
    name = f'{markdown(c.statement or c.id)}<br><code id="{c.id}">{breakable}</code><br>{where}'
    kind = f'<span class="kind kind-{c.kind}">{c.kind}</span><br>{markdown(c.source) or "derivation"}'
    held = f'{markdown(expected)}<br><span class="tolerance">{c.tolerance_text}</span>'
    return f"| {name} | {markdown(computed)} | {held} | {markdown(unit) or '–'} | {kind} |"
