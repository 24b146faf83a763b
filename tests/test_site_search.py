"""What the site's search takes from a page: its article's words, by section."""

from __future__ import annotations

import json
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

from website import search


def paragraph(*inside: nodes.Node) -> nodes.paragraph:
    return nodes.paragraph("", "", *inside)


def section(anchor: str, title: str, *inside: nodes.Node) -> nodes.section:
    return nodes.section("", nodes.title("", title), *inside, ids=[anchor])


def page(*inside: nodes.Node) -> nodes.document:
    made = nodes.document(None, None)
    made += list(inside)
    return made


def test_formulas_that_are_no_plain_text_are_an_ellipsis():
    inside = (
        nodes.Text("A tile of "),
        nodes.math("", "M = 64"),
        nodes.Text(" rows, "),
        nodes.math("", r"\alpha S_{ij}"),
    )
    assert search.text_of(paragraph(*inside)).strip() == "A tile of M = 64 rows, …"
    assert search.text_of(nodes.math_block("", "m_i = x")).strip() == "…"


def test_code_cells_and_markup_are_left_out_and_words_do_not_run_together():
    cell = nodes.container("", nodes.literal_block("", "x = 1"), paragraph(nodes.Text("an output")), classes=["cell"])
    row = nodes.row("", *(nodes.entry("", paragraph(nodes.Text(word))) for word in ("bytes", "seconds")))
    text = search.text_of(nodes.container("", cell, nodes.raw("", "<b>chrome</b>"), row))
    assert text.split() == ["bytes", "seconds"]
    words = paragraph(nodes.strong("", "Flash"), nodes.Text("Attention "), nodes.literal("", "tl.load"))
    assert search.text_of(words).strip() == "FlashAttention tl.load"


def test_sections_keep_their_own_text_and_each_term_of_the_glossary_is_one():
    inner = section("two", "Two", paragraph(nodes.Text("inside")))
    found = search.sections_of(page(section("one", "One", paragraph(nodes.Text("before")), inner)))
    assert found == [search.Section("", "One", "before"), search.Section("two", "Two", "inside")]


def test_a_page_is_named_by_the_terms_whose_definitions_link_to_it(tmp_path: Path):
    link = addnodes.pending_xref("", nodes.inline("", "Lecture 01"), reftarget="notebooks/01_gpu_model")
    definition = nodes.definition("", paragraph(nodes.Text("Lanes that wait. "), link))
    item = nodes.definition_list_item("", nodes.term("", "bank conflict", ids=["term-bank"]), definition)
    glossary = page(section("g", "Glossary", addnodes.glossary("", nodes.definition_list("", item))))
    assert search.explained(glossary) == {"notebooks/01_gpu_model": ("bank conflict",)}
    sections = search.sections_of(glossary)
    assert sections[1] == search.Section("term-bank", "bank conflict", "Lanes that wait. Lecture 01")
    search.write([search.Article("glossary", "Glossary", "", 0.3, (), sections)], tmp_path)
    script = (tmp_path / "articles.js").read_text(encoding="utf-8")
    (written,) = json.loads(script.removeprefix("window.courseArticles = ").rstrip(";\n"))
    assert written["page"] == "glossary.html" and written["sections"][1][0] == "term-bank"
    assert all((tmp_path / name).is_file() for name in search.STEMMER)
