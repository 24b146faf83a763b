"""The filter over the claims finds by words and by kind, says how many are left, and is not needed to read the page."""

import shutil
from pathlib import Path

import pytest

from website.places import WEBSITE

pytestmark = pytest.mark.slow

ROW = (
    '<tr><td>{words}<br><code id="{id}">{id}</code></td><td>1</td><td>1</td><td>-</td>'
    '<td><span class="kind kind-{kind}">{kind}</span></td></tr>'
)
CLAIMS = {
    "01 One": [("a.ridge", "Ridge point of an H100", "derive"), ("a.copy", "A copy's bandwidth", "measure")],
    "02 Two": [("b.ridge", "Ridge of a link", "state")],
}


def write_page(folder: Path) -> Path:
    sections = "".join(
        f"<section><h2>{title}</h2><div class='claims'><div><table><thead><tr><th>claim</th></tr></thead><tbody>"
        + "".join(ROW.format(id=id, words=words, kind=kind) for id, words, kind in rows)
        + "</tbody></table></div></div></section>"
        for title, rows in CLAIMS.items()
    )
    shutil.copytree(WEBSITE / "static", folder / "_static")
    page = folder / "claims.html"
    page.write_text(
        "<!doctype html><html lang=en><head><title>Claims</title><meta name=viewport content='width=device-width'>"
        f"<link rel=stylesheet href=_static/tables.css></head><body><main><section><h1>Claims</h1>{sections}"
        "<script src=_static/tables.js defer></script></section></main></body></html>",
        encoding="utf-8",
    )
    return page


@pytest.fixture
def tab(browser, tmp_path):
    opened = browser.new_page(viewport={"width": 390, "height": 800})
    opened.goto(write_page(tmp_path).as_uri())
    yield opened
    opened.close()


def shown(tab) -> list[str]:
    return [code.inner_text() for code in tab.query_selector_all("tbody code") if code.is_visible()]


def search(tab, words: str, count: str) -> list[str]:
    tab.fill("input[type=search]", words)
    tab.wait_for_function("count => document.querySelector('output').textContent === count", arg=count)
    return shown(tab)


def test_words_are_found_in_statement_and_id_and_the_count_is_announced(tab):
    assert shown(tab) == ["a.ridge", "a.copy", "b.ridge"]
    assert tab.inner_text("output") == "all 3 claims"
    assert tab.get_attribute("output", "aria-live") == "polite"
    assert search(tab, "RIDGE h100", "1 of 3 claims") == ["a.ridge"]
    assert search(tab, "a.", "2 of 3 claims") == ["a.ridge", "a.copy"]
    assert search(tab, "nothing like it", "0 of 3 claims") == []
    assert search(tab, "", "all 3 claims") == ["a.ridge", "a.copy", "b.ridge"]


def test_a_kind_can_be_switched_off_and_an_empty_notebook_goes_with_it(tab):
    tab.uncheck("input[value=state]")
    assert shown(tab) == ["a.ridge", "a.copy"]
    assert not tab.is_visible("text=02 Two")
    tab.uncheck("input[value=derive]")
    assert shown(tab) == ["a.copy"] and tab.inner_text("output") == "1 of 3 claims"


def test_a_link_to_a_hidden_claim_shows_it(tab):
    search(tab, "copy", "1 of 3 claims")
    tab.evaluate("location.hash = '#b.ridge'")
    tab.wait_for_function("document.querySelector('output').textContent === 'all 3 claims'")
    assert "b.ridge" in shown(tab)


def test_every_table_can_be_reached_by_keyboard_and_has_a_name(tab):
    boxes = tab.query_selector_all("[role=region]")
    assert [box.get_attribute("aria-label") for box in boxes] == ["01 One: table", "02 Two: table"]
    assert all(box.get_attribute("tabindex") == "0" for box in boxes)
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_without_javascript_the_page_is_its_tables(browser, tmp_path):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(write_page(tmp_path).as_uri())
    assert shown(tab) == ["a.ridge", "a.copy", "b.ridge"]
    assert tab.query_selector("form") is None
    context.close()
