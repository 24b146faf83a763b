"""How the site's pages are made from notebooks: texts, cells, figures, addresses, MathJax and icons."""

from __future__ import annotations

import html
import json
import re

import nbformat
import pytest
from pygments import highlight
from pygments.lexers import PythonLexer

from website import cells, icons, laptop, notebooks, places, prose
from website.code_lines import CodeLines

PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000280000001408060000")


def pages_of(text: str, own: str = "notebook 06") -> str:
    pages = {"notebook 05": "05_online_softmax.ipynb", "notebook 06": "06.ipynb", "lab 3": "../labs/lab3.ipynb"}
    return prose.link_lectures(text, pages, own)


def test_other_lectures_are_linked_where_the_text_names_them():
    assert pages_of("As notebook 05 says.") == "As [notebook 05](05_online_softmax.ipynb) says."
    assert pages_of("## 1. Title\n\nLecture 05 and lab 3.") == (
        "## 1. Title\n\n[Lecture 05](05_online_softmax.ipynb) and [lab 3](../labs/lab3.ipynb)."
    )


@pytest.mark.parametrize(
    "text",
    [
        "notebook 06, this one",
        "notebook 14, which is to come",
        "# Title with notebook 05",
        "`notebook 05` in code",
        "```\nnotebook 05\n```",
        "$notebook 05$",
        "[see notebook 05](x.ipynb)",
        "exercise of lab 3.4",
        '<a title="notebook 05">',
    ],
)
def test_what_is_no_mention_of_another_lecture_stays(text):
    assert pages_of(text) == text


def test_equations_can_be_linked_to_and_those_of_several_lines_stay_whole():
    several = "$$\\begin{aligned} a &= b \\\\ &= c \\end{aligned} \\tag{4}$$"
    text = f"So\n\n$$a = b. \\tag{{3}}$$\n\nand\n\n{several}\n\nby equation (3)."
    assert prose.tagged(text) == ["3", "4"]
    linked = prose.link_equations(text, {"3", "4"}, "05")
    assert linked.endswith("by [equation (3)](#eq-05-3).")
    assert prose.link_equations("equation (9)", {"3"}, "05") == "equation (9)"
    made = prose.own_lines(prose.anchor_equations(linked, "05"))
    assert "(eq-05-3)=\n$$a = b. \\tag{3}$$" in made
    assert "(eq-05-4)=\n```{math}\n:no-wrap:\n\n\\[\\begin{aligned}" in made
    assert made.count("\\tag{4}") == 1


def test_every_numbered_equation_of_every_lecture_is_found():
    for path in places.lectures():
        texts = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown"]
        tags = sum(len(re.findall(r"\\tag\{", text)) for text in texts)
        assert sum(len(prose.tagged(text)) for text in texts) == tags, path.name


def test_minutes_grow_with_words_equations_and_figures():
    assert prose.reading_minutes(["word " * 2000], 0) == 10
    assert prose.reading_minutes(["word " * 2000 + "$$x$$ " * 8], 12) == 15
    assert prose.reading_minutes(["```\n" + "code " * 5000 + "\n```"], 0) == 1


def test_a_page_begins_with_its_title():
    assert prose.under_title("# T\n\ntext", "BAR") == "# T\n\nBAR\n\ntext"
    with pytest.raises(ValueError, match="must begin with its title"):
        prose.under_title("text", "BAR")


def test_code_that_a_notebook_folds_is_folded_on_its_page(tmp_path):
    figures = cells.Figures(tmp_path, "figures", "x")
    for metadata, expected in (({}, []), ({"jupyter": {"source_hidden": True}}, ["hide-input"])):
        cell = nbformat.v4.new_code_cell("x = 1", metadata=metadata)
        (made,) = notebooks._code(cell, figures, "02")
        assert made.metadata["tags"] == expected


def test_a_figure_is_a_file_with_alternative_text_and_a_size(tmp_path):
    figures = cells.Figures(tmp_path, "../_static/figures", "05")
    tag = figures.show(PNG, 'a "quoted" < b', width=20)
    assert (tmp_path / "05-01.png").read_bytes() == PNG
    assert 'src="../_static/figures/05-01.png"' in tag and 'width="20" height="10"' in tag
    assert 'alt="a &quot;quoted&quot; &lt; b"' in tag and "course-as-drawn" not in tag
    outlines = figures.show(PNG, "a figure", width=20, svg=b"<svg/>")
    assert (tmp_path / "05-02.svg").read_bytes() == b"<svg/>" and not (tmp_path / "05-02.png").exists()
    assert 'src="../_static/figures/05-02.svg"' in outlines and 'width="20" height="10"' in outlines
    with pytest.raises(ValueError, match="figure 3 of 05 has no alternative text"):
        figures.show(PNG, " ")
    with pytest.raises(ValueError, match="not a PNG"):
        figures.show(b"GIF89a", "x")


def test_a_figure_that_speaks_of_dark_and_light_stays_as_it_was_drawn(tmp_path):
    assert cells.names_a_shade('subtitle="dark: the first step"') and cells.names_a_shade("the paler tiles")
    assert cells.names_a_shade("pipeline_timeline(x)") and not cells.names_a_shade("lightweight, highlighted, green")
    figures = cells.Figures(tmp_path, "x", "05")
    figures.as_drawn = True
    assert 'class="course-figure course-as-drawn"' in figures.show(PNG, "a")


@pytest.mark.parametrize(
    ("text", "goes_on"),
    [("every tile gives the output\nand the logsumexp", True), ("N    eager\n512  0.19 ms", False), ("1\n" * 6, False)],
)
def test_a_few_printed_lines_go_on_below_on_a_phone_and_columns_keep_their_places(text: str, goes_on: bool):
    assert ("course-lines" in cells.text_block(text)) == goes_on


def test_printed_text_is_escaped_and_a_claim_has_the_sites_colours():
    stream = {"output_type": "stream", "name": "stdout", "text": "<script>alert(1)</script>\n"}
    assert "<script>" not in cells.all_html([stream], None)
    line = '<details style="border:1px"><summary><span style="color:#009E73">✓</span> x</summary>y</details>'
    claim = {
        "output_type": "display_data",
        "data": {"text/html": line, "application/vnd.making-llms-fast.claim+json": {}},
    }
    shown = '<details class="course-claim"><summary><span>✓</span> x</summary>y</details>'
    assert cells.as_html(claim, cells.Figures(None, "", "")) == shown
    assert cells.all_html([stream, claim], None).endswith(shown)
    stream["text"] += "✓ equation (1): 240 numbers checked in float64\n"
    three = cells.all_html([claim, stream, claim], None)  # one line that opens, below what the cell shows
    assert three.startswith('<pre class="course-text ') and three.index("</pre>") < three.index("course-claims")
    assert "3 results checked</summary>" in three and three.count(shown) == 2 and three.count("equation (1)") == 1


def test_each_line_of_code_is_a_box_with_its_indentation_and_copies_as_it_was():
    code = "if x:\n    y = 1\n\n        # far\n"
    made = highlight(code, PythonLexer(), CodeLines(nowrap=False))
    assert re.findall(r'^(?:<div.*?>)?(?:<pre>)?(?:<span></span>)?<span class="(i\d+)">', made, re.M) == [
        "i0",
        "i1",
        "i2",
    ]
    assert html.unescape(re.sub(r"<[^>]+>", "", made)).strip() == code.strip()


@pytest.mark.slow
@pytest.mark.parametrize("path", [places.PREREQUISITES, *places.lectures(), *places.labs()], ids=lambda path: path.stem)
def test_a_staged_notebook_keeps_its_code_and_its_texts(path, tmp_path):
    whole = nbformat.read(path, as_version=4)
    made = notebooks.staged(path, cells.Figures(tmp_path, "../_static/figures", path.stem))
    code = [c.source for c in whole.cells if c.cell_type == "code" and "setup" not in c.metadata.get("tags", [])]
    assert [c.source for c in made.cells if c.cell_type == "code"] == code
    words = " ".join(c.source for c in made.cells if c.cell_type == "markdown")
    for cell in whole.cells:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#+ .*$", cell.source, re.M)
            assert all(heading in words for heading in headings)
    figures = sum("image/png" in o.get("data", {}) for c in whole.cells for o in c.get("outputs", []))
    animations = sum(
        re.search("data-(mlf|living)=", "".join(o.get("data", {}).get("text/html", ""))) is not None
        for c in whole.cells
        for o in c.get("outputs", [])
    )
    assert len(list(tmp_path.iterdir())) == figures - animations
    nbformat.validate(made)


def test_what_only_a_gpu_gives_stands_beside_what_a_laptop_prints():
    """Each such cell is in the record by its source, so a changed cell is told."""
    found = 0
    for path in places.lectures():
        for cell in nbformat.read(path, as_version=4).cells:
            if "gpu-output" in cell.metadata.get("tags", []):
                laptop.outputs(path.stem, cell)
                found += 1
    kept = json.loads(laptop.RECORD.read_text(encoding="utf-8"))["notebooks"]
    assert found == sum(len(cells_) for cells_ in kept.values()) > 20
    with pytest.raises(KeyError, match=r"renew it with `python -m website.laptop`"):
        laptop.outputs("05_online_softmax", nbformat.v4.new_code_cell("changed = True"))


def test_addresses_that_open_a_notebook_name_it():
    path = places.lectures()[4]
    by_name = {place.name: place.url for place in places.launches(path)}
    assert by_name["Colab"].endswith("/blob/main/notebooks/05_online_softmax.ipynb")
    assert by_name["Kaggle"].endswith("/blob/main/notebooks/05_online_softmax.ipynb")
    assert by_name["Binder"].endswith("urlpath=lab%2Ftree%2Fnotebooks%2F05_online_softmax.ipynb")
    assert "codespaces.new" in by_name["Codespaces"]
    assert places.page_of(places.labs()[0]) == "labs/lab1_roofline"


def test_the_icons_are_those_of_the_theme_and_few(tmp_path):
    icons.write(tmp_path)
    script = (tmp_path / icons.PLACE).read_text(encoding="utf-8")
    assert len(script) < 20_000 and all(f'"{name}":' in script for name in icons.NAMES)
    with pytest.raises(ValueError, match="none called 'angle-left'"):
        icons.drawings("")


def test_a_short_cell_of_a_table_stays_on_one_line_and_a_long_one_has_room():
    texts = {"64 x 64": "white-space:nowrap;", "on one of the GPUs": "", "four heads, 512 tokens": "min-width:7.5rem;"}
    cell = '<td style="{}text-align:left">{}</td>'
    made = cells.table_box("<table>" + "".join(cell.format("", text) for text in texts) + "</table>")
    assert [cell.format(style, text) in made for text, style in texts.items()] == [True] * 3


def test_no_formula_shows_the_backslash_of_an_underscore():
    """MathJax shows a text within a formula as it stands."""
    shown = re.compile(r"\\text\{[^}]*\\_")
    for path in [places.PREREQUISITES, *places.lectures(), *places.labs()]:
        texts = {c.id: c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown"}
        assert not [name for name, text in texts.items() if shown.search(text)], path.name
