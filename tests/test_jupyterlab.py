"""The course's extension in JupyterLab, in a real browser: prompts take a guess, and no notebook is changed by it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parameters import thorough_but
from test_grading_formgrader import Server, Tab

from utils import jupyterlab, notebooks, predictions
from utils.claims.ledger import notebook_paths

pytestmark = pytest.mark.slow

MARKED = [path for path in notebook_paths() if predictions.is_marked(notebooks.read(path).cells)]


@pytest.fixture(scope="module")
def tab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    private = tmp_path_factory.mktemp("private")
    jupyterlab.install(private)
    server = Server(notebooks.ROOT, private)
    try:
        yield Tab(browser.new_page(viewport={"width": 1400, "height": 900}), server)
    finally:
        server.stop()


def opened(tab: Tab, path: Path, prompts: int) -> Any:
    """A notebook in a workspace of its own, with all its prompts drawn and no guess made."""
    tab.page.evaluate("localStorage.clear()")
    tab.open(f"/lab/workspaces/{path.stem}/tree/{path.relative_to(notebooks.ROOT).as_posix()}", ".jp-Notebook")
    drawn = f"document.querySelectorAll('.jp-Notebook .predict-box').length === {prompts}"
    tab.page.wait_for_function(drawn, timeout=60_000)
    return tab.page


#: The indices of the cells that are held back.
HELD = """() => [...document.querySelectorAll('.jp-Notebook-cell')].map((cell, k) => [cell, k])
    .filter(([cell]) => getComputedStyle(cell).display === 'none').map(([_, k]) => k)"""


@pytest.mark.parametrize("path", thorough_but(MARKED, MARKED[0]), ids=lambda path: path.stem)
def test_every_prompt_takes_a_guess_and_shows_what_it_held_back(tab: Tab, path: Path):
    stored = path.read_bytes()
    prompts = predictions.predictions(notebooks.read(path).cells)
    page = opened(tab, path, len(prompts))
    held = [list(range(prompt.cell + 1, prompt.until + 1)) for prompt in prompts]
    page.wait_for_function(f"cells => ({HELD})().join() === cells.join()", arg=[*itertools.chain(*held)])
    for k, prompt in enumerate(prompts):
        cell = page.locator(".jp-Notebook-cell").nth(prompt.cell)
        box = cell.locator(".predict-box")
        box.scroll_into_view_if_needed()
        if prompt.choices:
            cell.locator("input[type=radio]").nth(len(prompt.choices) - 1).wait_for(state="attached")
            assert cell.locator("input[type=radio]").count() == len(prompt.choices)
            cell.locator("input[type=radio]").first.check()
            box.get_by_role("button", name="Commit").click()
        else:
            box.locator("input").fill("7")
            box.locator("input").press("Enter")
        page.wait_for_function(f"cells => ({HELD})().join() === cells.join()", arg=[*itertools.chain(*held[k + 1 :])])
        assert box.locator(".predict-verdict").inner_text().strip(), prompt.name
    assert tab.errors() == []
    assert path.read_bytes() == stored


def test_running_cell_by_cell_stops_at_a_prompt_and_goes_on_behind_the_guess(tab: Tab):
    path = MARKED[0]
    prompts = predictions.predictions(notebooks.read(path).cells)
    page = opened(tab, path, len(prompts))
    cells = page.locator(".jp-Notebook-cell")
    cells.nth(prompts[0].cell).click(position={"x": 200, "y": 10})
    page.keyboard.press("Shift+Enter")
    page.wait_for_function("document.activeElement.matches('.predict-box input')")
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    first = prompts[0].cell + 1
    page.wait_for_function(
        "k => document.querySelectorAll('.jp-Notebook-cell')[k].matches('.jp-mod-active')", arg=first
    )
    page.wait_for_function("document.activeElement.closest('.jp-Notebook-cell')")
    assert "jp-mod-active" in cells.nth(first).get_attribute("class")


def test_the_help_menu_lists_the_guesses(tab: Tab):
    path = MARKED[0]
    prompts = predictions.predictions(notebooks.read(path).cells)
    page = opened(tab, path, len(prompts))
    first = page.locator(".predict-box").first
    first.scroll_into_view_if_needed()
    first.get_by_role("button", name="Show the answer").click()
    page.click(".lm-MenuBar-itemLabel:text-is('Help')")
    page.click(".lm-Menu-itemLabel:text-is('Your Predictions')")
    page.wait_for_selector(".predict-report li")
    assert "no guess; the answer is" in page.inner_text(".predict-report")
    assert tab.errors() == []
