"""Living figures in notebooks: what a cell shows holds all it needs, with a still for viewers without scripts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from utils import living
from utils.living.__main__ import renew
from utils.plots.show import Animation
from website.cells import Figures, as_html

ROOT = Path(__file__).parents[1]
ALT = "A roofline of an H100 with the point of a matrix product on its flat part"

STILL = Animation("", b"\x89PNG\r\n\x1a\n", ALT)


@pytest.fixture(scope="module")
def shown() -> living.Animation:
    return living.show("roofline", STILL, gpu="A100", m=64)


def test_a_notebook_holds_script_style_settings_and_still_and_asks_nobody(shown):
    data, about = shown._repr_mimebundle_()
    page = data["text/html"]
    assert page.index("data-settings") < page.index("<img alt=") < page.index("<style>") < page.index("<script>")
    assert "{&quot;gpu&quot;:&quot;A100&quot;,&quot;m&quot;:64}" in page
    assert page.count("<script") == page.count("</script>") == 1 and " src=" not in page[page.index("<style>") :]
    assert "image/png" in data and about["image/png"]["alt"] == ALT
    assert len(page) < 150_000


@pytest.mark.slow
@pytest.mark.parametrize("name", living.FIGURES)
def test_it_starts_in_a_page_that_has_nothing_else(browser, name):
    page = browser.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.set_content(living.show(name, STILL).html)
    page.wait_for_selector(f'[data-living="{name}"][data-ready] svg')
    assert page.locator(".mlf-results").is_visible() and not page.locator(".mlf-error:not(:empty)").count()
    assert page.get_by_role("button", name="Copy link").count() == 0, "the address is the notebook's"
    assert wrong == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roofline", "parallelism", "scheduler"])
def test_two_on_one_page_have_names_of_their_own(browser, name):
    page = browser.new_page()
    page.set_content(2 * living.show(name, STILL).html)
    page.wait_for_function("document.querySelectorAll('[data-ready] .mlf-plot svg').length === 2")
    twice = """() => [...document.querySelectorAll("[id]"), ...document.querySelectorAll("form")]
      .map((each) => each.id || each.ariaLabel).filter((each, i, all) => all.indexOf(each) < i)"""
    assert page.evaluate(twice) == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize(("wish", "scroll"), [("reduce", "auto"), ("no-preference", "smooth")])
def test_who_asks_for_less_motion_gets_none_that_was_not_asked_for(browser, wish, scroll):
    """A figure waits for its Play button in any case; nothing fades, and a link to a setting jumps to the figure."""
    page = browser.new_page(reduced_motion=wish)
    page.set_content(re.sub(r" data-settings=\S+", "", living.show("online_softmax", STILL).html))
    page.wait_for_selector('[data-living="online_softmax"][data-ready] svg')
    said = page.get_attribute(".mlf-player input", "aria-valuetext")
    fading = "() => getComputedStyle(document.querySelector('.mlf-field input')).transitionDuration"
    assert page.evaluate(fading) == ("0s" if wish == "reduce" else "0.15s")
    page.wait_for_timeout(1000)  # longer than a step is shown while a figure plays
    assert page.get_attribute(".mlf-player input", "aria-valuetext") == said
    page.evaluate("() => { Element.prototype.scrollIntoView = options => { window.asked = options; }; }")
    page.evaluate("() => { location.hash = '#tile=1'; }")
    page.wait_for_function("() => window.asked")
    assert page.evaluate("window.asked.behavior") == scroll
    page.close()


def test_on_the_site_its_scripts_are_files(shown, tmp_path):
    made = as_html({"output_type": "display_data", "data": shown._repr_mimebundle_()[0]}, Figures(tmp_path, "x", "02"))
    assert '<script defer src="../_static/living/roofline.js"></script>' in made and "<script>" not in made
    assert 'data-settings="{&quot;gpu&quot;:&quot;A100&quot;,&quot;m&quot;:64}"' in made and f'alt="{ALT}"' in made


def test_an_unknown_figure_is_refused():
    with pytest.raises(ValueError, match=r"no living figure 'rofline'; there are roofline, memory, serving"):
        living.show("rofline", STILL)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem[:2])
def test_notebooks_store_the_scripts_of_today(path):
    """`python -m utils.living notebooks/*.ipynb` renews them."""
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            page = output.get("data", {}).get("text/html", "")
            assert living.renewed(page) == page, cell.id
            assert "data-living" not in page or living.renewed(page + " ") != page + " ", "it can be renewed"


def test_a_notebook_is_renewed_and_nothing_else_in_it_changes(tmp_path, shown):
    old = shown.html.replace("MLF.start(", "MLF.begin(")
    path = tmp_path / "a.ipynb"
    cell = {"cell_type": "code", "outputs": [{"data": {"text/html": old.splitlines(True)}}, {"text": ["1"]}]}
    path.write_text(
        json.dumps({"cells": [cell, {"cell_type": "markdown", "source": ["×"]}]}, indent=1, ensure_ascii=False) + "\n"
    )
    assert renew(path) and not renew(path)
    after = json.loads(path.read_text())
    assert "".join(after["cells"][0]["outputs"][0]["data"]["text/html"]) == shown.html
    assert after["cells"][0]["outputs"][1] == {"text": ["1"]} and after["cells"][1]["source"] == ["×"]
