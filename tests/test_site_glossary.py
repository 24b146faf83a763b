"""The glossary says what words mean and where they come from; the references are the notebooks' own, no more."""

import json
import re
from functools import cache

import pytest

pytest.importorskip("pybtex")
from pybtex.database import parse_file

from website import reference
from website.places import LECTURES, WEBSITE, labs, lectures, page_of

PAGE = WEBSITE / "pages" / "glossary.md"
LINK = re.compile(r"\[Lecture\s+(\d\d)\]\(/notebooks/([\w.]+)\)\.$")
NOTEBOOKS = [*lectures(), *labs()]


def entries() -> list[tuple[list[str], str]]:
    """Terms (one or more names) and the definition of each entry of the glossary."""
    text = PAGE.read_text(encoding="utf-8")
    found = []
    for glossary in re.findall(r"^```\{glossary\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for entry in glossary.strip().split("\n\n"):
            lines = entry.split("\n")
            terms = [line for line in lines if not line.startswith("  ")]
            found.append((terms, " ".join(line.strip() for line in lines if line.startswith("  "))))
    return found


def prose(notebook) -> str:
    """The Markdown of a notebook in lower case, on one line."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return " ".join(" ".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown").split()).lower()


# ---- glossary ------------------------------------------------------------------------------------------------------


def test_the_glossary_defines_the_words_of_every_lecture():
    cited = {LINK.search(definition)[1] for _, definition in entries()}
    assert len(entries()) >= 90
    assert cited == {path.stem[:2] for path in lectures()}


def test_every_term_occurs_in_the_lecture_that_its_entry_links_to():
    texts = {path.name: prose(path) for path in lectures()}
    for terms, definition in entries():
        link = LINK.search(definition)
        assert link, f"{terms[0]}: no link to a lecture at the end of {definition!r}"
        assert link[2].startswith(link[1]) and link[2] in texts, f"{terms[0]}: {link[2]} is no lecture"
        for term in terms:
            word = re.sub(r" \(.*\)$", "", term).lower()
            assert word in texts[link[2]], f"{term!r} does not occur in {link[2]}"


def test_entries_are_short_sentences():
    for terms, definition in entries():
        words = LINK.sub("", definition).strip()
        assert words.endswith((".", "?", ")")) and 5 <= len(words.split()) <= 60, (terms, words)


def test_terms_are_in_alphabetical_order_below_their_letter_and_none_stands_twice():
    first = [terms[0].lower() for terms, _ in entries()]
    assert first == sorted(first)
    everything = [term.lower() for terms, _ in entries() for term in terms]
    assert len(everything) == len(set(everything))
    text = PAGE.read_text(encoding="utf-8")
    sections = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    assert sections[::2] == sorted(sections[::2])
    for letter, section in zip(sections[::2], sections[1::2]):
        names = re.findall(r"(?:^```\{glossary\}\n|\n\n)(?!```)(\S.*)$", section, re.MULTILINE)
        assert names, letter
        assert all(n[0].upper() == letter or (letter == "0-9" and n[0].isdigit()) for n in names), (letter, names)
        assert f"[{letter}](#{letter.lower()})" in text, f"no link to {letter}"


# ---- notation ------------------------------------------------------------------------------------------------------


def test_the_notation_page_has_every_table_of_the_lectures_readme():
    page = reference.notation()
    readme = (LECTURES / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## Notation") :]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 50
    assert all(row in page for row in rows)
    assert page.count("\n# ") + page.startswith("# ") == 1
    assert "## Sizes" in page and "### " not in page
    assert 'style="color:' not in page and page.count('class="swatch"') == 5  # words in the page's own colour


def test_a_readme_without_notation_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("# The lectures\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no section '## Notation'"):
        reference.notation(tmp_path / "README.md")


# ---- references ----------------------------------------------------------------------------------------------------


@cache
def bibliography():
    return parse_file(str(reference.BIBLIOGRAPHY), bib_format="bibtex").entries


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_source_that_a_notebook_lists_has_an_entry(notebook):
    lines = reference.source_lines(notebook)
    assert lines, f"{notebook.name}: no sources"
    for line in lines:
        found = [entry for entry in bibliography().values() if reference.names(line, entry)]
        assert found, f"{notebook.name}: no entry for {line!r}"
        for title in reference.titles_in(line):
            assert any(reference.plain(reference.title_of(e)).startswith(title) for e in found), (line, title)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_years_agree_with_the_notebooks(notebook):
    for line in reference.source_lines(notebook):
        years = set(re.findall(r"\b(1[89]\d\d|20\d\d)\b", line))
        for entry in bibliography().values():
            if years and "year" in entry.fields and reference.names(line, entry):
                preprint = entry.fields.get("eprint", entry.fields["year"][2:])[:2]
                assert years & {entry.fields["year"], f"20{preprint}"}, (line, entry.key)


@pytest.mark.slow
def test_every_entry_is_read_somewhere_and_the_page_says_where():
    page = reference.references()
    for source in reference.sources():
        assert source.read_in, f"{source.key}: no notebook lists it"
        line = next(line for line in page.splitlines() if f"{{cite:p}}`{source.key}`" in line)
        assert source.entry.fields["annote"].split(".")[0] in line
        for path in source.read_in:
            assert f"(/{page_of(path)}.ipynb)" in line, (source.key, path)


def test_an_entry_has_an_author_a_title_and_well_formed_identifiers():
    for entry in bibliography().values():
        assert entry.persons["author"] and entry.fields["title"] and entry.fields["annote"].endswith(".")
        assert re.fullmatch(r"\d{4}\.\d{4,5}", entry.fields.get("eprint", "2205.14135")), entry.key
        assert re.fullmatch(r"10\.\d{4,}/\S+", entry.fields.get("doi", "10.1145/1")), entry.key
        assert entry.fields.get("url", "https://").startswith("https://"), entry.key
    identifiers = [e.fields[f] for e in bibliography().values() for f in ("eprint", "doi") if f in e.fields]
    assert len(identifiers) == len(set(identifiers))


def test_a_line_names_the_right_one_of_two_papers_by_one_author():
    entries = bibliography()
    line = "T. Dao. *FlashAttention-2.* 2023. The logsumexp that parts are merged by."
    assert reference.names(line, entries["dao2024"])
    assert not reference.names(line, entries["dao2022"])
    assert not reference.names("T. Dao. *Something else.* 2023.", entries["dao2024"])
    assert not reference.names("D. Knuth. *FlashAttention-2.* 2023.", entries["dao2024"])
