"""The prompts of the lectures: their comments are well formed and right, and a reader's guess is judged by them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from utils import notebooks, predictions
from utils.claims import expressions
from utils.claims.ledger import notebook_paths
from website.places import labs
from website.predictions import plain

LABS = labs()
CLAIMS = {"a.bytes": 3.35e6, "a.share": 0.2361, "a.count": 3}


def cells(*texts: str) -> list[dict[str, Any]]:
    """Markdown cells, and a code cell for each empty text."""
    return [
        {"cell_type": "markdown", "source": text} if text else {"cell_type": "code", "source": "1", "outputs": []}
        for text in texts
    ]


def wrong(*texts: str) -> list[str]:
    return predictions.problems(cells(*texts), "05", CLAIMS, {}.__getitem__)


def prompt(mark: str, choices: int = 0) -> str:
    listed = "".join(f"- choice {n}\n" for n in range(1, choices + 1))
    return f"Text.\n\n**Predict.** How many?\n\n{listed}\n<!-- predict {mark} -->"


@pytest.mark.slow
def test_the_prompts_of_lectures_and_labs_are_in_order():
    claims = expressions.claim_values()
    marked = 0
    for path in (*notebook_paths(), *LABS):
        found = notebooks.read(path).cells
        if predictions.is_marked(found):
            assert predictions.problems(found, path.stem.partition("_")[0], claims) == []
            marked += len(predictions.predictions(found))
    assert marked >= 11


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_lab_asks_with_prompts_that_what_to_notice_answers_and_never_holds_back_a_check(path):
    found = notebooks.read(path).cells
    assert not [cell.source for cell in found if re.search(r"(?m)^Predict\b", cell.source)]
    prompts = predictions.predictions(found)
    held = [found[k] for prompt in prompts for k in prompt.held]
    assert len(held) == len(prompts) > 0
    assert all(cell.source.startswith("**When it passes, notice.**") for cell in held)


@pytest.mark.parametrize(
    "mark",
    ["05.a: 3.35 MB = a.bytes", "05.a: 3,350 kB = a.bytes", "05.a: 24 % = a.share", "05.a: 3 loads, exactly = a.count",
     "05.a: 0.67 of it, within 1.1 = 2 / 3", "05.a-b: 3 = 2 + 1"],
)  # fmt: skip
def test_a_number_that_its_expression_gives_is_right(mark):
    assert wrong(prompt(mark), "", "It is.") == []


@pytest.mark.parametrize(
    ("texts", "says"),
    [((prompt("05.a: 3.36 MB = a.bytes"), "A."), "05.a says 3.36, a.bytes says 3.35 MB"),
     ((prompt("05.a: 4 = b.other"), "A."), "cannot be computed"),
     ((prompt("05.a: 4"), "A."), "is neither"),
     ((prompt("06.a: 3 = 3"), "A."), "must begin with 05."),
     ((prompt("05.a: 3, within 1 = 3"), "A."), "a factor lies between"),
     ((prompt("05.a: choice 2", 2), "A."), "has 2 choices"),
     ((prompt("05.a: choice 4", 3), "A."), "choice 4 is said to be right"),
     ((prompt("05.a: 3 = 3") + "\n\nMore.", "A."), "must be a line of its own, the last one"),
     ((prompt("05.a: 3 = 3"), ""), "no Markdown cell follows"),
     ((prompt("05.a: 3 = 3"), "", "A.\n\n## 4. Next"), "must not hold a heading"),
     ((prompt("05.a: 3 = 3"), prompt("05.b: 3 = 3"), "A."), "must not hold another prompt"),
     ((prompt("05.a: 3 = 3"), "A.", prompt("05.a: 3 = 3"), "A."), "a second time"),
     (("**Predict** this.", "A."), "without its comment"),
     (("Guess.\n\n<!-- predict 05.a: 3 = 3 -->", "A."), "no paragraph that begins with **Predict.**")],
)  # fmt: skip
def test_what_is_wrong_with_a_prompt_is_said(texts, says):
    found = wrong(*texts)
    assert any(says in problem for problem in found), found


def test_the_rows_of_a_table_below_the_prompt_can_be_its_answer():
    table = "step   rate\n-----  --------\nfirst  227 MB/s"
    code = {"cell_type": "code", "source": "", "outputs": [{"data": {"text/plain": table}}]}
    found = [*cells(prompt("05.a: 227 MB/s = table:[step=first].rate")), code, *cells("It is.")]
    assert predictions.problems(found, "05", {}) == []


def test_a_prompt_holds_back_all_up_to_its_answer():
    [found] = predictions.predictions(cells("# T", prompt("05.a: choice 2", 3), "", "", "It is.", "More."))
    assert (found.name, found.cell, found.until) == ("05.a", 1, 4)
    assert (found.question, found.choices) == ("How many?", ("choice 1", "choice 2", "choice 3"))


def test_a_prompt_of_a_lab_holds_back_its_answer_alone():
    [found] = predictions.predictions(cells("# T", prompt("lab3.a: 3 = 3"), "", "", "It is.", "More."))
    assert list(found.held) == [4]


def test_make_test_finds_a_wrong_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = next(path for path in notebook_paths() if path.stem.startswith("05"))
    changed = tmp_path / path.name
    changed.write_text(path.read_text(encoding="utf-8").replace("predict 05.maxima: 9.6", "predict 05.maxima: 9.7"))
    monkeypatch.setattr(notebooks, "home", lambda _: "notebooks")
    [problem] = notebooks.problems(changed)
    assert "05.maxima says 9.7, online.maxima.8192 says 9.58819 maxima" in problem


# ---- in a browser


def page(mark: str, choices: int = 0, between: str = "") -> str:
    """A prompt as the site stages it, with the script and its style; ``between`` stands before what it holds back."""
    listed = "<ul>" + "".join(f"<li><p>choice {n}</p></li>" for n in range(1, choices + 1)) + "</ul>" if choices else ""
    return (
        f"<!doctype html><html lang=en><title>T</title><style>{predictions.style()}</style><body>"
        f"<p><strong>Predict.</strong> How many?</p>{listed}"
        f'<div class="predict" data-all="all.html" data-mark="predict {mark}"></div>{between}'
        "<details class=predict-held><summary>Show the answer</summary><p id=answer>It is.</p></details>"
        f"<div class=predict-report data-prompts='[]'></div><script>{predictions.script()}</script></body></html>"
    )


@pytest.fixture
def show(browser: Any, tmp_path: Path):
    tab = browser.new_page()

    def opened(mark: str, choices: int = 0, between: str = "") -> Any:
        (tmp_path / "page.html").write_text(page(mark, choices, between), encoding="utf-8")
        tab.goto((tmp_path / "page.html").as_uri())
        return tab

    yield opened
    tab.close()


slow = pytest.mark.slow


ABOUT, LOADS, NUMBERS = "05.a: 9.6 maxima = 9.6", "05.a: 3 loads, exactly = 3", "05.a: 4,096 numbers, exactly = 4096"


@slow
@pytest.mark.parametrize(
    ("mark", "guess", "guessed", "answer", "verdict"),
    [(ABOUT, "8", "8 maxima", "9.6 maxima", "ratio 0.833 ✓ right, within a factor of 1.5"),
     (ABOUT, "20 maxima", "20 maxima", "9.6 maxima", "ratio 2.08 ✗ not within a factor of 1.5"),
     (LOADS, "4", "4 loads", "3 loads", "ratio 1.33 ✗ not this time"),
     (LOADS, "3", "3 loads", "3 loads", "ratio 1 ✓ right"),
     ("05.a: 1.33 times, within 1.1 = 4 / 3", "4/3", "1.333 times", "1.33 times",
      "ratio 1 ✓ right, within a factor of 1.1"),
     ("05.a: 2 MB = 2e6", "1900 kB", "1.9 MB", "2 MB", "ratio 0.95 ✓ right, within a factor of 1.5"),
     (NUMBERS, "2^12", "4,096 numbers", "4,096 numbers", "ratio 1 ✓ right"),
     (NUMBERS, "4k", "4,000 numbers", "4,096 numbers", "ratio 0.977 ✗ not this time"),
     ("05.a: 24 % = 0.24", "-24%", "−24 %", "24 %", "ratio −1 ✗ not within a factor of 1.5"),
     ("05.a: 0 errors, exactly = 0", "0", "0 errors", "0 errors", "✓ right")],
)  # fmt: skip
def test_a_guess_stands_beside_the_answer_with_their_ratio(show, mark, guess, guessed, answer, verdict):
    tab = show(mark)
    said = f"You predicted {guessed} the answer is {answer} {verdict}"
    assert not tab.is_visible("#answer")
    tab.fill(".predict-box input", guess)
    tab.press(".predict-box input", "Enter")
    assert " ".join(tab.locator(".predict-part").all_inner_texts()) == said
    assert tab.is_visible("#answer") and not tab.is_visible("form")
    tab.wait_for_timeout(200)  # the browser writes what a page keeps beside the page, later when it has just started
    tab.reload()
    assert " ".join(tab.locator(".predict-part").all_inner_texts()) == said, "it is kept"


@slow
@pytest.mark.parametrize("guess", ["", "many", "1/0", "3 4", "2 GB/s", "<b>1</b>", "9" * 80, "1e999"])
def test_a_guess_that_is_no_number_is_refused_and_reveals_nothing(show, guess):
    tab = show("05.a: 2 MB = 2e6")
    tab.fill(".predict-box input", guess)
    tab.click("text=Commit")
    assert tab.inner_text(".predict-note")
    assert not tab.is_visible("#answer")
    assert tab.evaluate("localStorage.length") == 0


@slow
@pytest.mark.parametrize(
    ("pick", "said"), [(1, "✗ the right answer is marked above"), (2, "✓ right"), (0, "The answer is marked above.")]
)
def test_a_choice_is_marked_right_or_wrong_by_keyboard_alone(show, pick, said):
    tab = show("05.a: choice 2", 3)
    tab.click("text=Commit")
    assert "Choose one" in tab.inner_text(".predict-note") and not tab.is_visible("#answer")
    if pick:
        tab.locator("input[type=radio]").first.focus()
        tab.keyboard.press("Space")
        for _ in range(pick - 1):
            tab.keyboard.press("ArrowDown")
        tab.keyboard.press("Enter")
    else:
        tab.focus("text=Show the answer >> nth=0")
        tab.keyboard.press("Enter")
    assert tab.locator(".predict-part").all_inner_texts() == [said]
    assert tab.locator("li.predict-right .predict-choice").all_inner_texts() == ["choice 2"]
    assert tab.locator("li.predict-wrong").count() == (1 if pick == 1 else 0)
    assert tab.is_visible("#answer")


@slow
def test_the_list_of_guesses_counts_them_and_forgets_them(show):
    tab = show("05.a: 9.6 maxima = 9.6")
    assert tab.inner_text(".predict-report") == "You have made no prediction yet."
    tab.fill(".predict-box input", "8")
    tab.click("text=Commit")
    shown = tab.inner_text(".predict-report")
    assert "1 predictions made, 1 of them right. The typical number was off by a factor of 1.2." in shown
    assert "How many?" in shown and "✓ you: 8 maxima; the answer: 9.6 maxima; ratio 0.833" in shown
    tab.once("dialog", lambda dialog: dialog.accept())
    tab.click("text=Forget all guesses")
    assert "no prediction yet" in tab.inner_text(".predict-report")
    assert tab.is_visible("form") and not tab.is_visible("#answer"), "the prompt asks again"


@slow
def test_nothing_breaks_where_the_browser_keeps_nothing(show):
    tab = show("05.a: 9.6 maxima = 9.6")
    tab.evaluate("localStorage.setItem(MLF.predict.KEY, 'nonsense')")
    tab.reload()
    tab.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full'); }; }")
    tab.fill(".predict-box input", "8")
    tab.click("text=Commit")
    assert tab.is_visible("#answer") and "ratio 0.833" in tab.inner_text(".predict-verdict")


@slow
def test_a_check_between_a_prompt_and_its_answer_stays_in_sight(show):
    tab = show("lab3.a: 3 = 3", between="<pre id=check>check(x)</pre>")
    assert tab.is_visible("#check") and not tab.is_visible("#answer")
    tab.fill(".predict-box input", "3")
    tab.click("text=Commit")
    assert tab.is_visible("#answer")


@slow
def test_the_script_reads_every_mark_as_python_does(show):
    tab = show("05.a: 3 = 3")
    for path in (*notebook_paths(), *LABS):
        for found in predictions.predictions(notebooks.read(path).cells):
            read = tab.evaluate(f"MLF.predict.parse({json.dumps(found.mark)})")
            assert read["name"] == found.name
            assert bool(found.choices) == ("right" in read)


@slow
def test_without_scripts_the_answer_is_a_fold(browser: Any, tmp_path: Path):
    (tmp_path / "page.html").write_text(page("05.a: 9.6 maxima = 9.6"), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto((tmp_path / "page.html").as_uri())
    assert not tab.is_visible("#answer")
    tab.click("text=Show the answer")
    assert tab.is_visible("#answer")
    context.close()


@pytest.mark.parametrize(
    ("text", "shown"),
    [(r"Is $e^{m_{i-1} - m_i}$ **exactly** 1?", "Is e^(m_i-1 - m_i) exactly 1?"),
     (r"At $\frac{2ND}{3}$ `tokens_per_s` of [lab 3](x.ipynb), $N = 1{,}024$?",
      "At 2ND/3 tokens_per_s of lab 3, N = 1,024?"),
     (r"$\varnothing \oplus \mathbf{Q}$", "∅ ⊕ Q")],
)  # fmt: skip
def test_a_question_is_a_line_of_text_in_the_list(text, shown):
    assert plain(text) == shown
