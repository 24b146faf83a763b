"""The site's search: the text of its articles as data, for MiniSearch to index in the reader's browser.

Takes the place of Sphinx's own search, whose page it keeps. `static/search.js` does the rest.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path

import sphinx.search
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

#: Below the static files: what the browser loads when a reader begins to type.
PLACE = Path("search")
#: Snowball's English stemmer, from Sphinx.
STEMMER = ("base-stemmer.js", "english-stemmer.js")
#: What a page is, by the folder that it is in.
KINDS = {"notebooks": "Lecture", "labs": "Lab", "explorers": "Living figure", "records": "Measurement"}
#: How much a match counts on pages that use or gather what a lecture explains: they come after it.
WEIGHTS = {
    "labs/": 0.5,
    "explorers/": 0.5,
    "records/": 0.3,
    **dict.fromkeys(("claims", "glossary", "references", "notation", "plans"), 0.3),
}
#: TeX that reads as plain text: letters, digits and signs.
_PLAIN = re.compile(r"(?:[^\W_]|[\s=<>+\-*/.,()|])*")
#: What of a page is no text of the article: markup, code, pictures; cells with their output, the tables of all claims.
_CHROME = (nodes.raw, nodes.literal_block, nodes.image, nodes.comment, addnodes.toctree, addnodes.index)
_CHROME_CLASSES = {"cell", "claims"}


@dataclass
class Section:
    """A section's anchor (empty for the page's own), heading, and text without the sections within it."""

    anchor: str
    heading: str
    text: str


@dataclass(frozen=True)
class Article:
    """A page as the search sees it.

    Attributes:
        page: address below the site, without suffix.
        kind: what it is, in a word or two, where its title does not say; else empty.
        weight: how much a match in it counts.
        terms: terms of the glossary that send the reader to this page: it is the one that explains them.
        sections: the page's own first.
    """

    page: str
    title: str
    kind: str
    weight: float
    terms: tuple[str, ...]
    sections: list[Section]


def text_of(node: nodes.Node) -> str:
    """The words of a node: a formula that is no plain text is an ellipsis, code and chrome are left out."""
    if isinstance(node, nodes.Text):
        return node.astext()
    if isinstance(node, nodes.math | nodes.math_block):
        tex = node.astext().replace("$", "").strip()
        return tex if _PLAIN.fullmatch(tex) and "\\" not in tex else "…"
    if isinstance(node, _CHROME) or _CHROME_CLASSES & set(node["classes"]):
        return " "
    text = "".join(text_of(child) for child in node.children)
    return text if isinstance(node, nodes.Inline) else f" {text} "


def sections_of(doctree: nodes.document) -> list[Section]:
    """The sections of a page in order, the page's own first; each term of the glossary is one of its own."""
    found = [Section("", "", "")]

    def walk(node: nodes.Element, into: Section) -> None:
        for child in node.children:
            if isinstance(child, nodes.section):
                title = child.next_node(nodes.title)
                top = len(found) == 1 and not found[0].heading
                inner = found[0] if top else Section(child["ids"][0], "", "")
                inner.heading = _line(text_of(title))
                if not top:
                    found.append(inner)
                walk(child, inner)
            elif isinstance(child, addnodes.glossary):
                for item in child.findall(nodes.definition_list_item):
                    term, definition = item.next_node(nodes.term), item.next_node(nodes.definition)
                    found.append(Section(term["ids"][0], _line(text_of(term)), _line(text_of(definition))))
            elif not isinstance(child, nodes.title):
                into.text = _line(f"{into.text} {text_of(child)}")

    walk(doctree, found[0])
    return found


def _line(text: str) -> str:
    return " ".join(text.split())


def explained(glossary: nodes.document) -> dict[str, tuple[str, ...]]:
    """Page -> the terms whose definitions in the glossary link to it."""
    found: dict[str, tuple[str, ...]] = {}
    for item in glossary.findall(nodes.definition_list_item):
        page = item.next_node(addnodes.pending_xref)["reftarget"]
        found[page] = (*found.get(page, ()), item.next_node(nodes.term).astext())
    return found


def articles(app: Sphinx) -> list[Article]:
    """Every page that has an article, in the order of their names."""
    made, terms = [], explained(app.env.get_doctree("glossary"))
    for page in sorted(app.env.found_docs - {"search", "404"}):
        sections = sections_of(app.env.get_doctree(page))
        kind = KINDS.get(page.split("/")[0], "") if "/" in page and not page.endswith("/index") else ""
        weight = next((weight for start, weight in WEIGHTS.items() if page.startswith(start)), 1.0)
        made.append(Article(page, sections[0].heading, kind, weight, terms.get(page, ()), sections))
    return made


def _replace_sphinx_search(app: Sphinx) -> None:
    app.builder.search = False  # no index, scripts and page of its own


def _write(app: Sphinx, exception: Exception | None) -> None:
    if exception is None:
        write(articles(app), Path(app.outdir) / "_static" / PLACE)


def write(found: list[Article], folder: Path) -> None:
    """Write the articles, as a script so that pages opened from a disk can load it, and the stemmer beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = [
        {
            "page": f"{each.page}.html",
            "title": each.title,
            "kind": each.kind,
            "weight": each.weight,
            "terms": each.terms,
            "sections": [astuple(section) for section in each.sections],
        }
        for each in found
    ]
    text = json.dumps(pages, ensure_ascii=False, separators=(",", ":"))
    (folder / "articles.js").write_text(f"window.courseArticles = {text};\n", encoding="utf-8")
    for name in STEMMER:
        shutil.copy2(Path(sphinx.search.__file__).parent / "minified-js" / name, folder / name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx's door to this extension."""
    app.connect("builder-inited", _replace_sphinx_search)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
