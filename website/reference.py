"""Two pages of reference: the notation, from the lectures' own README, and the sources, from the lectures and labs.

``references.bib`` holds each source once, with what it is read for; which lecture or lab reads it is found by matching
the lines of their sections "Sources".
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pybtex.database import Entry, parse_file

from website.ledger import markdown, script
from website.places import LECTURES, WEBSITE, labs, lectures, page_of
from website.record_pages import PARTS

BIBLIOGRAPHY = WEBSITE / "references.bib"

_REFERENCES = """\
# References

What the lectures and labs cite, by the part that cites it first, with what each is read for. The full list is
[at the end](#all-references).
"""

_NOTATION = """\
# Notation

The symbols of the lectures and labs. Words are in the [glossary](glossary.md).
"""


@dataclass(frozen=True)
class Source:
    """A source: its key in the bibliography, its entry there, and the notebooks that list it."""

    key: str
    entry: Entry
    read_in: tuple[Path, ...]


def write(source: Path) -> None:
    """Write ``notation.md`` and ``references.md`` into the folder of the site's sources."""
    (source / "notation.md").write_text(notation(), encoding="utf-8")
    (source / "references.md").write_text(references(), encoding="utf-8")


# ---- notation ------------------------------------------------------------------------------------------------------


def notation(readme: Path = LECTURES / "README.md") -> str:
    """The section "Notation" of the lectures' README as a page of its own, its headings one level up."""
    found = re.search(r"^## Notation\n(.*?)(?=^## |\Z)", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{readme}: no section '## Notation'")
    text = re.sub(r"^#(#+ )", r"\1", found[1], flags=re.MULTILINE)
    return _NOTATION + _swatches(text)


def _swatches(text: str) -> str:
    """Coloured words as words beside a patch of the colour: text in that colour would be hard to read on some pages."""
    patch = r'<span class="swatch" style="background:\1"></span>\2'
    return re.sub(r'<span style="color:(#[0-9A-Fa-f]{6})">(.*?)</span>', patch, text) + (
        "\n<style>.swatch{border-radius:2px;display:inline-block;height:.8em;margin-right:.35em;width:.8em}</style>\n"
    )


# ---- sources -------------------------------------------------------------------------------------------------------


def references() -> str:
    """The page of sources as MyST Markdown: a list for each part of the course, then the bibliography."""
    parts = [_REFERENCES]
    for part, places in PARTS.items():
        first = [source for source in sources() if source.read_in and _place(source.read_in[0]) in places]
        if first:
            parts += [f"## {part}\n", *map(_line, first), ""]
    parts += ["## All references\n", "```{bibliography}\n:all:\n```\n", script("_static")]
    return "\n".join(parts)


def _line(source: Source) -> str:
    links = ", ".join(f"[{_place(path).replace('lab', 'lab ')}](/{page_of(path)}.ipynb)" for path in source.read_in)
    title, use = markdown(title_of(source.entry)), markdown(source.entry.fields["annote"])
    return f"- **{title}** {{cite:p}}`{source.key}`. {use} Read in {links}."


def _place(notebook: Path) -> str:
    return notebook.stem.split("_")[0]


@cache
def sources() -> tuple[Source, ...]:
    """All entries of the bibliography in its order, each with the notebooks whose sections "Sources" list it."""
    listed = {path: source_lines(path) for path in (*lectures(), *labs())}
    entries = parse_file(str(BIBLIOGRAPHY), bib_format="bibtex").entries
    return tuple(
        Source(
            key=key,
            entry=entry,
            read_in=tuple(path for path, lines in listed.items() if any(names(line, entry) for line in lines)),
        )
        for key, entry in entries.items()
    )


def source_lines(notebook: Path) -> list[str]:
    """The items of a notebook's section "Sources", as Markdown; empty when it has none."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = re.sub(r"<!--.*?-->", "", text)  # what a number is bound to
    section = re.search(r"^## Sources\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return (
        [" ".join(item.split()) for item in re.findall(r"^- (.+(?:\n(?![-\n]).+)*)", section[1], re.M)]
        if section
        else []
    )


def title_of(entry: Entry) -> str:
    """An entry's title without braces."""
    return entry.fields["title"].strip("{}")


def plain(text: str) -> str:
    """Words in lower case without accents and marks, a space on both sides of each, to compare titles and names."""
    letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return f" {' '.join(re.findall(r'[a-z0-9]+', letters))} "


def names(line: str, entry: Entry) -> bool:
    """Whether a line of sources, as Markdown, names an entry.

    It does with one of the entry's own phrases, or with the first author's family name and, in italics, the title or
    its beginning.
    """
    words = plain(line)
    phrases = entry.fields.get("cited_as", "").split(";")
    if any(plain(phrase) in words for phrase in phrases if phrase.strip()):
        return True
    author = entry.persons["author"][0]
    family = plain(" ".join((*author.prelast_names, *author.last_names)))
    return family in words and any(plain(title_of(entry)).startswith(title) for title in titles_in(line))


def titles_in(line: str) -> list[str]:
    """What stands in italics in a line of sources, as :func:`plain` gives it."""
    return [plain(title) for title in re.findall(r"\*([^*]+)\*", line)]
