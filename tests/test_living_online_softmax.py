"""The online-softmax bench: its states are those of equation (7), its weights those of PyTorch's softmax."""

# ruff: noqa: F811  (fixtures are imported)

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from living_tab import LivingTab, living_tab  # noqa: F401  (fixtures)
from parameters import thorough_but

from utils.plots.online import MOST_SCORES, TileStep, check_steps

CASES = 500
NAME = "online_softmax"


def drawn(rng: random.Random) -> tuple[list[float], int, bool]:
    """A row of scores, some masked, a tile and whether the old sum is rescaled."""
    size, spread = rng.randint(1, 32), rng.choice((1, 10, 300))
    row = [-math.inf if rng.random() < 0.1 else round(rng.gauss(rng.choice((0, -500)), spread), 4) for _ in range(size)]
    row[rng.randrange(size)] = round(rng.gauss(0, spread), 4)
    return row, rng.randint(1, 32), rng.random() < 0.7


def text(row: list[float]) -> str:
    return ", ".join("-inf" if score == -math.inf else repr(score) for score in row)


def exps(row: list[float], reference: float) -> float:
    return sum(math.exp(score - reference) for score in row if score > -math.inf)


@pytest.mark.slow
def test_500_random_rows_have_the_states_of_the_recurrence_and_the_weights_of_pytorchs_softmax(living_tab: LivingTab):
    rng = random.Random(1729)
    cases = [drawn(rng) for _ in range(CASES)]
    asked = [{"scores": text(row), "tile": str(tile), "rescale": str(int(on))} for row, tile, on in cases]
    for (row, tile, rescale), found in zip(cases, living_tab.run(NAME, asked), strict=True):
        exact = torch.tensor(row, dtype=torch.float64)
        assert found["exact"] == pytest.approx(torch.softmax(exact, 0).tolist(), rel=1e-9, abs=1e-200)
        m, d, steps = -math.inf, 0.0, []
        for step, start in zip(found["steps"], range(0, len(row), tile), strict=True):
            part = row[start : start + tile]
            factor, m = (math.exp(m - max(m, *part)) if m > -math.inf else 0.0), max(m, *part)
            d = d * (factor if rescale else 1) + exps(part, m)
            assert (number(step["m"]), step["factor"]) == (m, pytest.approx(factor, rel=1e-9, abs=1e-300))
            assert step["d"] == pytest.approx(d, rel=1e-9)
            assert step["right"] == pytest.approx(exps(row[: start + tile], m), rel=1e-9)
            steps.append(TileStep(tuple(part), m, factor, tuple(math.exp(x - m) for x in part), step["d"]))
        assert found["weights"] == pytest.approx([math.exp(x - m) / d for x in row], rel=1e-9, abs=1e-300)
        if rescale and all(map(math.isfinite, row)):
            if len(row) <= MOST_SCORES:
                check_steps(steps)
            assert math.log(steps[-1].total) + m == pytest.approx(exact.logsumexp(0).item(), rel=1e-9)


def number(value: object) -> float:
    """A number as Chromium hands it over; -inf is no JSON and comes as None or a string."""
    return -math.inf if value is None else float(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "texts"),
    [
        ("scores", ["", " , ", "a, b", "1, 2, three", "1 " * 33, "-inf, -inf", "1e99", "inf", "NaN, 1", "1;2;<b>"]),
        ("tile", ["", "0", "-1", "1.5", "33", "two"]),
    ],
)
def test_nonsense_gets_a_message_and_the_results_are_withdrawn(living_tab: LivingTab, field, texts):
    page = living_tab.open(NAME)
    for wrong in texts:
        page.locator(f"#mlf-{NAME}-{field}").fill(wrong)
        assert len(page.locator(f"#mlf-{NAME}-{field}-error").inner_text()) > 10, wrong
        assert not page.locator(".mlf-results").is_visible(), wrong
    living_tab.check()


@pytest.mark.slow
def test_a_keyboard_steps_drags_and_shows_the_bug(living_tab: LivingTab):
    page = living_tab.open(NAME)
    steps = {"Back to the start", "One step back", "Play", "One step forward", "step"}
    handles = {f"score {k}" for k in range(1, 5)}
    assert living_tab.tabbed() == handles | steps | {"scores", "tile", "rescale", "Start again"}
    said = page.locator(".mlf-reading")
    assert said.inner_text().startswith("Tile 1 of 2 is read"), "it begins with something to see"
    page.get_by_role("button", name="One step forward").focus()
    page.keyboard.press("ArrowLeft")
    assert said.inner_text().startswith("Nothing is read yet")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert "is multiplied by e^(−29 − (−20)) = 0.0001234" in said.inner_text() and "d = 2.000169" in said.inner_text()
    page.locator("#mlf-online_softmax-rescale").focus()
    page.keyboard.press("Space")
    assert "d = 3.367879 instead of 2.000169" in said.inner_text()
    page.get_by_role("button", name="One step forward").focus()
    page.keyboard.press("End")
    assert "sum to 0.5938956" in said.inner_text() and page.locator(".mlf-bad-bar").count() == 4
    page.get_by_role("slider", name="score 1").focus()
    for _ in range(3):
        page.keyboard.press("ArrowUp")
    field = page.locator("#mlf-online_softmax-scores")
    assert field.input_value() == "-27.5, -30, -20, -20"
    assert page.evaluate("document.activeElement.dataset.handle") == "score-0", "the handle keeps the focus"
    page.get_by_role("button", name="Start again").focus()
    page.keyboard.press("Enter")
    assert field.input_value() == "-29, -30, -20, -20"
    living_tab.check()


@pytest.mark.slow
@pytest.mark.timed
def test_a_score_follows_the_pointer_60_times_a_second(living_tab: LivingTab, record_property):
    page = living_tab.open(NAME)
    page.locator("#mlf-online_softmax-scores").fill(", ".join(str(k % 7) for k in range(32)))
    page.get_by_role("button", name="One step forward").click()
    knob = page.get_by_role("slider", name="score 5", exact=True)
    before, frame = knob.get_attribute("aria-valuenow"), living_tab.frame(knob)
    assert knob.get_attribute("aria-valuenow") != before
    record_property("milliseconds_a_frame", frame)
    assert frame < living_tab.budget()
    living_tab.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scores", "tile"),
    [
        ("-29, -30, -20, -20", 2),
        ("3", 1),
        ("-inf, -inf, 3, -inf", 2),
        ("1e-9, 2e-9, 3e-9", 1),
        (", ".join(["1000000, -1000000"] * 16), 32),
        (", ".join(["0"] * 32), 1),
    ],
)
@pytest.mark.parametrize("rescale", thorough_but((0, 1), 1))
def test_nothing_is_cut_or_covered_in_phone_lecture_and_notebook(living_tab: LivingTab, scores, tile, rescale):
    page = living_tab.open(NAME, scores=scores, tile=tile, rescale=rescale)
    last = int(page.locator(".mlf-player input").get_attribute("max"))
    for step in sorted({0, 1, min(2, last), last - 1, last}):
        page.locator(".mlf-player input").fill(str(step))
        assert living_tab.crowded(390, 806, 1040) == [], step
        assert not set(re.findall("NaN|Infinity|undefined|null", page.locator(".mlf-results").inner_html()))
    living_tab.check()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_a_phone_and_axe_finds_nothing_grave(living_tab: LivingTab, theme):
    page = living_tab.open(NAME, theme, scores=", ".join(str(k % 7) for k in range(32)), tile=8, rescale=0)
    page.get_by_role("button", name="Play").focus()
    page.keyboard.press("End")
    assert living_tab.fits(390) and living_tab.fits(1000)
    living_tab.check()
    assert living_tab.grave() == []
