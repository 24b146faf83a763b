"""The course's extension in JupyterLab, in a real browser: prompts take a guess, and no notebook is changed by it."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.sign import NotebookNotary
from parameters import thorough_but
from test_grading_formgrader import Server, Tab

from grading import student_copy
from utils import jupyterlab, notebooks, predictions
from utils.claims.ledger import notebook_paths
from website.places import labs

pytestmark = pytest.mark.slow

SOLUTIONS = notebooks.ROOT / "solutions" / "lab3_flash_attention"
MARKED = [path for path in (*notebook_paths(), *labs()) if "<!-- predict " in path.read_text(encoding="utf-8")]


@pytest.fixture(scope="module")
def tab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    private = tmp_path_factory.mktemp("private")
    jupyterlab.install(private)
    server = Server(notebooks.ROOT, private)
    try:
        yield Tab(browser.new_page(viewport={"width": 1400, "height": 900}), server)
    finally:
        server.stop()


#: The lecture that the other tests open; its first prompt asks for a number.
LECTURE = next(path for path in MARKED if path.stem.startswith("05"))


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


@pytest.mark.thorough
@pytest.mark.parametrize("path", MARKED, ids=lambda path: path.stem)
def test_every_prompt_takes_a_guess_and_shows_what_it_held_back(tab: Tab, path: Path):
    stored = path.read_bytes()
    prompts = predictions.predictions(notebooks.read(path).cells)
    page = opened(tab, path, len(prompts))
    held = [list(prompt.held) for prompt in prompts]
    page.wait_for_function(f"cells => ({HELD})().join() === cells.join()", arg=[*itertools.chain(*held)])
    for k, prompt in enumerate(prompts):
        cell = page.locator(".jp-Notebook-cell").nth(prompt.cell)
        box = cell.locator(".predict-box")
        box.scroll_into_view_if_needed()
        if prompt.choices:
            cell.locator("input[type=radio]").nth(len(prompt.choices) - 1).wait_for(state="attached")
            assert cell.locator("input[type=radio]").count() == len(prompt.choices)
            cell.locator("input[type=radio]").first.press("Space")
            page.keyboard.press("ArrowDown")
            assert cell.locator("input[type=radio]").nth(1).is_checked(), "keys are the list's, not the notebook's"
            box.get_by_role("button", name="Commit").click()
        else:
            box.locator("input").fill("7")
            box.locator("input").press("Enter")
        page.wait_for_function(f"cells => ({HELD})().join() === cells.join()", arg=[*itertools.chain(*held[k + 1 :])])
        assert box.locator(".predict-verdict").inner_text().strip(), prompt.name
    assert tab.errors() == []
    assert path.read_bytes() == stored


def test_running_cell_by_cell_stops_at_a_prompt_and_goes_on_behind_the_guess(tab: Tab):
    path = LECTURE
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


@pytest.mark.thorough
def test_the_help_menu_lists_the_guesses(tab: Tab):
    path = LECTURE
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


# ---- living figures

#: Lectures with living figures -> the indices of their cells.
LIVING = {
    path: places
    for path in notebook_paths()
    if "living.show(" in path.read_text(encoding="utf-8")
    if (places := [k for k, cell in enumerate(notebooks.read(path).cells) if "living.show(" in cell.source])
}
#: Takes prompts for answered, so that nothing is held back.
ANSWER = """names => {
    const entry = { guess: null, answer: "", right: false, question: "" };
    localStorage.setItem(MLF.predict.KEY, JSON.stringify(Object.fromEntries(names.map(name => [name, entry]))));
    dispatchEvent(new Event("mlf-predictions"));
}"""
#: Parts of a figure that leave it.
OUTSIDE = """figure => {
    const { left, right } = figure.getBoundingClientRect();
    return [...figure.querySelectorAll("svg, svg text, button, input, p, dd")]
        .map(each => [each.getBoundingClientRect(), each.outerHTML.slice(0, 120)])
        .filter(([box]) => box.width && (box.left < left - 1 || box.right > right + 1)).map(([, html]) => html);
}"""


@pytest.mark.parametrize("path", thorough_but(LIVING, LECTURE), ids=lambda path: path.stem)
def test_the_living_figures_of_a_trusted_notebook_live(tab: Tab, path: Path):
    """They start without a kernel's help, fit their cell, step by keyboard without moving the notebook's cells, and ask
    nobody for anything."""
    stored = nbformat.read(path, as_version=4)
    NotebookNotary(data_dir=str(tab.server.data)).sign(stored)
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url))
    place = path.relative_to(notebooks.ROOT).as_posix()
    tab.open(f"/lab/workspaces/living{path.stem}/tree/{place}", ".jp-Notebook .predict-box")
    tab.page.evaluate(ANSWER, [prompt.name for prompt in predictions.predictions(stored.cells)])
    for k in LIVING[path]:
        cell = tab.page.locator(".jp-Notebook-cell").nth(k)
        cell.scroll_into_view_if_needed()
        figure = cell.locator("figure.mlf-explorer[data-ready]")
        figure.locator(".mlf-plot svg").first.wait_for(timeout=60_000)
        figure.scroll_into_view_if_needed()
        assert figure.evaluate(OUTSIDE) == []
        assert figure.locator(".mlf-hint").first.evaluate("hint => getComputedStyle(hint).marginBottom") == "0px"
        for kind in (".mlf-player input", "[role=slider]"):
            for control in figure.locator(kind).all()[:1]:
                control.press("Home")
                before = control.get_attribute("aria-valuetext")
                control.press("ArrowRight")
                assert control.get_attribute("aria-valuetext") != before
        assert figure.evaluate("figure => figure.contains(document.activeElement)"), "keys are the figure's"
    elsewhere = [url for url in asked if not url.startswith((tab.server.url, "data:", "blob:"))]
    assert elsewhere == []
    assert tab.errors() == []


# ---- a lab, from `make lab`


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The students' copy of the course."""
    out = tmp_path_factory.mktemp("out")
    assert student_copy.main([str(out)]) == 0
    return out / student_copy.NAME


@pytest.fixture(scope="module")
def lab_tab(browser: Any, course: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """JupyterLab as `make lab LAB=lab3` starts it, but for the browser, the port and where the extension is written."""
    private = tmp_path_factory.mktemp("private")
    shown = subprocess.run(["make", "-n", "lab", "LAB=lab3"], cwd=course, capture_output=True, text=True, check=True)
    joined = shown.stdout.replace("\\\n", " ").splitlines()
    assert any(line.endswith("-m utils.jupyterlab") for line in joined)
    jupyterlab.install(private)
    command = shlex.split(next(line for line in joined if "jupyter lab" in line))
    arguments = [each for each in command[command.index("lab") + 1 :] if each != "--allow-root"]
    server = Server(course, private, *arguments)
    try:
        tab = Tab(browser.new_page(viewport={"width": 1440, "height": 900}), server)
        tab.page.goto(server.url)
        yield tab
    finally:
        server.stop()


#: Whether the kernel waits, as the status bar says.
IDLE = "document.querySelector('#jp-main-statusbar').innerText.includes('| Idle')"


def type_into_module(page: Any, text: str) -> None:
    """Replace what the editor holds, as a paste does, and save."""
    page.click(".jp-FileEditor .cm-content")
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)
    page.keyboard.press("Control+s")
    page.wait_for_function("() => !document.querySelector('.lm-TabBar-tab.jp-mod-dirty [class*=python]')")


def run_cell(page: Any, index: int) -> str:
    """Run a cell of the notebook and return what it shows."""
    cell = page.locator(".jp-Notebook-cell").nth(index)
    cell.scroll_into_view_if_needed()
    cell.locator(".jp-InputArea-prompt").click()
    before = cell.locator(".jp-InputArea-prompt").inner_text()
    page.keyboard.press("Control+Enter")
    page.wait_for_function(
        """([k, before]) => {
            const cell = document.querySelectorAll('.jp-Notebook-cell')[k];
            const now = cell.querySelector('.jp-InputArea-prompt').innerText;
            return now !== before && /\\d/.test(now);
        }""",
        arg=[index, before],
        timeout=180_000,
    )
    return cell.locator(".jp-Cell-outputArea").inner_text()


@pytest.mark.thorough
def test_lab_3_is_worked_on_side_by_side_without_leaving_the_page(lab_tab: Tab, course: Path):
    page = lab_tab.page
    folder = course / "labs" / "lab3_flash_attention"
    cells = json.loads((folder / "lab3_flash_attention.ipynb").read_text(encoding="utf-8"))["cells"]
    place = {cell["id"]: index for index, cell in enumerate(cells)}
    page.wait_for_selector(".jp-FileEditor .cm-content", timeout=60_000)
    address = page.url
    notebook, editor = (page.locator(part).bounding_box() for part in (".jp-Notebook", ".jp-FileEditor"))
    assert notebook["x"] + notebook["width"] <= editor["x"] and min(notebook["width"], editor["width"]) > 400
    assert "def merge(" in page.inner_text(".jp-FileEditor")
    page.wait_for_function(IDLE, timeout=60_000)
    assert page.locator(".jp-mod-dirty").count() == 0, "nobody has changed anything"

    assert "Error" not in run_cell(page, place["imports"])
    assert run_cell(page, place["check-3-1"]).startswith("3.1 is not written yet: merge.py, line")

    right = re.sub(r".*### (BEGIN|END) SOLUTION.*\n", "", (SOLUTIONS / "merge.py").read_text(encoding="utf-8"))
    wrong = right.replace("d1 * torch.exp(m1 - finite) + d2", "d1 + d2")
    assert wrong != right
    type_into_module(page, wrong)
    assert "likely cause: neither sum is rescaled to the new maximum" in run_cell(page, place["check-3-1"])

    type_into_module(page, right.replace("return m, d1", "return m, (d1"))
    assert "merge.py, line 26: SyntaxError: '(' was never closed" in run_cell(page, place["check-3-1"])

    type_into_module(page, right)
    assert "✓ exercise 3.1 (merge operator): all" in run_cell(page, place["check-3-1"])
    assert page.url.split("?")[0] == address.split("?")[0]
    assert lab_tab.errors() == []


def test_an_exercise_opens_its_module_beside_the_notebook_and_a_lecture_is_a_link(tab: Tab):
    lab = next(path for path in labs() if path.stem.startswith("lab3"))
    page = opened(tab, lab, len(predictions.predictions(notebooks.read(lab).cells)))
    page.locator("a:has-text('tiled_attention.py')").first.click()
    page.wait_for_selector(".lm-TabBar-tabLabel:text-is('tiled_attention.py')")
    left, right = (
        page.locator(f".lm-TabBar-tab:has-text('{name}')").bounding_box() for name in ("lab3_fl", "tiled_at")
    )
    assert right["x"] > left["x"] + left["width"]
    assert page.locator(".jp-Notebook").is_visible()
    page.locator(".course-mention:text-is('lecture 12')").first.evaluate("link => link.click()")
    page.wait_for_selector(".lm-TabBar-tabLabel:has-text('12_paged')", timeout=30_000)


@pytest.mark.thorough
def test_a_cell_that_takes_long_says_so_and_how_far_it_is_and_stores_nothing(lab_tab: Tab, course: Path):
    page = lab_tab.page
    (course / "long.ipynb").write_text(json.dumps(LONG), encoding="utf-8")
    lab_tab.open("/lab/workspaces/long/tree/long.ipynb", ".jp-Notebook-cell")
    page.wait_for_function(IDLE, timeout=60_000)
    page.locator(".jp-InputArea-prompt").first.click()
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".course-running:text-matches('running for \\\\d+ s · case \\\\d+ of 40')", timeout=60_000)
    page.wait_for_function("() => !document.querySelector('.course-running')", timeout=60_000)
    assert page.locator(".jp-OutputArea-child").count() == 0


#: A notebook whose only cell takes some seconds.
LONG = {
    "cells": [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": "long",
            "metadata": {},
            "outputs": [],
            "source": "import time\nfrom utils import progress\n"
            "for k in progress.steps(range(40), 'case'): time.sleep(0.15)",
        }
    ],
    "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


@pytest.mark.thorough
def test_a_figure_that_waits_for_its_cell_says_so(tab: Tab):
    path = next(path for path in notebook_paths() if path.stem.startswith("10"))
    assert path not in LIVING, "other tests trust those, and what is trusted plays"
    tab.open(f"/lab/workspaces/still/tree/notebooks/{path.name}", ".jp-Notebook")
    figure = tab.page.locator(".jp-OutputArea-output figure").first
    figure.wait_for(state="attached", timeout=60_000)
    assert "Run this cell" in figure.evaluate("figure => getComputedStyle(figure, '::after').content")


def test_nobody_is_asked_about_news_and_other_settings_of_the_environment_stay(tmp_path: Path):
    defaults = tmp_path / "etc" / "jupyter" / "labconfig" / "default_setting_overrides.json"
    defaults.parent.mkdir(parents=True)
    defaults.write_text('{"of another": {"x": 1}}')
    for _ in range(2):
        jupyterlab.install(tmp_path)
    assert json.loads(defaults.read_text()) == {
        "of another": {"x": 1},
        "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"},
    }
