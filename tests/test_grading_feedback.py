"""What a student reads of a result: it says what the result says, whatever a submission made a check say.

The feedback page can be read on a phone, on paper and in the dark; Gradescope's file has the documented form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from grading import gradescope
from grading.feedback import CSS, LINES, OUTCOMES, WIDTH, page, points

MESSAGE = """exercise 2.3 (RMSNorm): 12 of 99 elements differ
  first at out[row=64], owned by program (1, 1)
  wrong tiles:   .X.X      ('.' right, 'X' wrong)"""


def exercise(number: str, outcome: str, message: str = "", most: float = 10, **more: Any) -> dict[str, Any]:
    score = most if outcome == "passed" else 0
    given = {"number": number, "title": f"about {number}", "score": score, "max_score": most, "outcome": outcome}
    return given | {"message": message, "seconds": 1.5} | more


def result(*exercises: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A result as the grader writes it."""
    return {
        "format": 1,
        "lab": "lab2_triton_kernels",
        "title": "Lab 2. Triton kernels",
        "student": "ada",
        "digest": "ab12cd34" * 8,
        "graded": "2026-11-21T12:30:00+00:00",
        "seconds": 12.3,
        "score": sum(e["score"] for e in exercises),
        "max_score": sum(e["max_score"] for e in exercises),
        "status": "graded",
        "notes": [],
        "exercises": list(exercises),
    } | more


EVERY_OUTCOME = [exercise(f"2.{i}", outcome, f"said of {outcome}") for i, outcome in enumerate(OUTCOMES, start=1)]


class Page(HTMLParser):
    """What a page is made of: every tag with its attributes, the text by enclosing tag, and whether tags pair up."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in dict.fromkeys(self.open):
            self.texts[tag][-1] += data

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(self.texts["main"][0].split())


def test_the_page_says_lab_student_score_and_every_outcome_in_words_and_symbol():
    shown = Page(page(result(*EVERY_OUTCOME)))
    assert shown.texts["h1"] == ["Lab 2. Triton kernels"] and shown.texts["title"] == ["Lab 2. Triton kernels · ada"]
    assert "Feedback for ada" in shown.text and "10 of 70 points" in shown.text
    assert "1 of 7 exercises passed." in shown.text
    rows = [" ".join(row.split()) for row in shown.texts["tr"][1:]]
    assert len(rows) == len(OUTCOMES)
    for row, (name, outcome) in zip(rows, OUTCOMES.items(), strict=True):
        assert outcome.words in row and outcome.symbol in row and "/ 10" in row, name
    assert len({outcome.words for outcome in OUTCOMES.values()}) == len(OUTCOMES)
    assert len({outcome.symbol for outcome in OUTCOMES.values()}) == len(OUTCOMES)


def test_each_exercise_without_its_points_has_its_message_and_what_to_do_next():
    shown = Page(page(result(*EVERY_OUTCOME)))
    others = [name for name in OUTCOMES if name != "passed"]
    assert shown.texts["pre"] == ["said of passed", *(f"said of {name}" for name in others)]
    for name in others:
        advice = OUTCOMES[name].advice.replace("`", "").format(command="make check-lab LAB=lab2")
        assert " ".join(advice.split()) in shown.text, name


def test_an_outcome_links_to_its_explanation():
    shown = Page(page(result(*EVERY_OUTCOME)))
    targets = {attributes["id"] for _, attributes in shown.tags if "id" in attributes}
    links = [attributes["href"] for attributes in shown.attributes("a")]
    assert len(links) == len(OUTCOMES) and {link.removeprefix("#") for link in links} == targets


def test_a_perfect_submission_is_told_so_and_nothing_else():
    shown = Page(page(result(exercise("2.1", "passed", most=2.5), exercise("2.2", "passed", most=15))))
    assert "17.5 of 17.5 points" in shown.text and "Every exercise passed." in shown.text
    assert "What to do next" not in shown.text and "pre" not in shown.texts


def test_a_voluntary_exercise_that_is_not_attempted_is_minded_by_nobody():
    left, wrong = exercise("2.2", "not attempted", "stub", most=0), exercise("2.2", "failed", "it differs", most=0)
    shown = Page(page(result(exercise("2.1", "passed"), left)))
    assert "10 of 10 points" in shown.text and "Every exercise passed." in shown.text and "voluntary" in shown.text
    assert "What to do next" not in shown.text and "stub" not in shown.text
    assert [test["number"] for test in gradescope.results(result(exercise("2.1", "passed"), left))["tests"]] == ["2.1"]
    shown = Page(page(result(exercise("2.1", "passed"), wrong)))
    assert "1 of 2 exercises passed." in shown.text and "it differs" in shown.text and "0 of 0" not in shown.text
    assert len(gradescope.results(result(exercise("2.1", "passed"), wrong))["tests"]) == 2


def test_a_submission_that_could_not_be_read_says_why():
    failed = [exercise("2.1", "not attempted"), exercise("2.2", "not attempted")]
    shown = Page(page(result(*failed, status="unreadable", notes=["ada.zip is not a zip file"])))
    assert "could not be read" in shown.text and "ada.zip is not a zip file" in shown.text
    assert "0 of 20 points" in shown.text and "What to do next" not in shown.text


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"format": 2}, "expected a result of format 1, got 2"),
        ({"status": "lost"}, "got 'lost'"),
        ({"exercises": [exercise("2.1", "guessed")]}, r"exercise 2\.1: outcome must be one of passed, .* 'guessed'"),
    ],
)
def test_a_result_that_the_page_does_not_know_is_refused(broken, complaint):
    with pytest.raises(ValueError, match=complaint):
        page(result(exercise("2.1", "passed")) | broken)


@pytest.mark.parametrize(("value", "text"), [(10, "10"), (10.0, "10"), (7.5, "7.5"), (0, "0"), (100, "100")])
def test_points_are_written_as_people_write_them(value, text):
    assert points(value) == text


# ---- text of a stranger ----
HOSTILE = "</pre></main><script>alert(1)</script><img src=x onerror=alert(2)><a href='https://x.test'>\"'&amp;</style>"


def hostile_page() -> str:
    """A page with hostile text in every place that a submission can reach, and in others."""
    return page(
        result(
            exercise(HOSTILE, "failed", HOSTILE, title=HOSTILE),
            exercise("2.2", "passed", HOSTILE),
            lab=HOSTILE,
            title=HOSTILE,
            student=HOSTILE,
            digest=HOSTILE,
            graded=HOSTILE,
            notes=[HOSTILE],
        )
    )


def test_whatever_a_submission_says_is_text():
    shown = Page(hostile_page())
    assert {tag for tag, _ in shown.tags}.isdisjoint({"script", "img", "iframe", "link", "object", "form", "svg"})
    assert shown.texts["pre"] == [HOSTILE, HOSTILE]
    for tag, attributes in shown.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        assert "href" not in attributes or attributes["href"].startswith("#exercise-")


def test_the_page_asks_for_nothing_and_lets_nothing_run():
    shown = Page(page(result(*EVERY_OUTCOME)))
    policies = [a["content"] for a in shown.attributes("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]
    assert not re.search(r"url\(|@import|https?:", CSS)
    assert not any({"src", "srcset", "data", "action"} & attributes.keys() for _, attributes in shown.tags)


@pytest.mark.parametrize(
    "character", ["\0", "\x07", "\x1b", "\x7f", "\x85", "\u202e", "\u2066", "\u2028", "\ud800", "\ufeff"], ids=ascii
)
def test_a_character_that_acts_instead_of_being_read_is_marked(character):
    text = page(result(exercise("2.1", "failed", f"one{character}two"), student=f"a{character}b"))
    text.encode("utf-8")
    assert character not in text and "one\ufffdtwo" in text and "a\ufffdb" in text


def test_terminal_colours_are_left_out_and_every_end_of_line_is_one():
    shown = Page(page(result(exercise("2.1", "failed", "\x1b[31mred\x1b[0m\r\nnext\rlast \x1b]0;title\x07x"))))
    assert shown.texts["pre"] == ["red\nnext\nlast x"]


def test_a_message_of_ten_megabytes_is_cut_in_the_middle_and_says_so():
    message = "first line\n" + "spam and eggs\n" * 750_000 + "the last line"
    text = page(result(exercise("2.1", "crashed", message)))
    (shown,) = Page(text).texts["pre"]
    assert len(text) < 40_000
    assert shown.startswith("first line\n") and shown.endswith("the last line")
    head, cut, tail = re.split(r"\n\n\[\.\.\. ([\d,]+) characters are left out here \.\.\.\]\n\n", shown)
    assert len(head) + int(cut.replace(",", "")) + len(tail) == len(message)


def test_a_line_without_end_is_cut_and_says_so():
    (shown,) = Page(page(result(exercise("2.1", "failed", "x" * 5_000 + "\nafter")))).texts["pre"]
    assert shown == "x" * WIDTH + f" [... {5_000 - WIDTH:,} characters are left out here ...]\nafter"


def test_too_many_lines_are_cut_in_the_middle_and_say_so():
    message = "\n".join(map(str, range(500)))
    (shown,) = Page(page(result(exercise("2.1", "failed", message)))).texts["pre"]
    lines = shown.split("\n")
    assert lines[0] == "0" and lines[-1] == "499" and len(lines) == LINES + 3
    assert sum("characters are left out here" in line for line in lines) == 1


def test_long_names_and_a_flood_of_notes_are_cut():
    text = page(result(exercise("2.1", "passed", title="t" * 9_000), student="s" * 9_000, notes=["n" * 9_000] * 900))
    assert len(text) < 60_000 and "… and 880 more notes" in text


# ---- a page that everyone can read ----
@pytest.mark.slow
def test_a_browser_shows_it_without_a_script_a_request_a_sideways_scroll_or_a_barrier(browser, tmp_path: Path):
    """At any width, in light, in dark and on paper; axe-core finds nothing: language, headings, tables, contrast."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    (tmp_path / "hostile.html").write_text(hostile_page(), encoding="utf-8")
    wide = [exercise(f"2.{i}", o, "x" * 5_000 + "\n" + MESSAGE) for i, o in enumerate(OUTCOMES)]
    (tmp_path / "wide.html").write_text(page(result(*wide, notes=["y" * 900])), encoding="utf-8")
    grounds = set()
    for name in ("hostile.html", "wide.html"):
        asked: list[str] = []
        tab = browser.new_page()
        tab.on("request", lambda request, asked=asked: asked.append(request.url))
        tab.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
        tab.goto((tmp_path / name).as_uri())
        for look in ({"color_scheme": "light"}, {"color_scheme": "dark"}, {"color_scheme": "light", "media": "print"}):
            tab.emulate_media(**look)
            for width in (320, 390, 1200):
                tab.set_viewport_size({"width": width, "height": 800})
                assert tab.evaluate("document.documentElement.scrollWidth") == width, (name, width)
            assert asked == [(tmp_path / name).as_uri()]
            found = axe.run(tab).response["violations"]
            assert not found, (name, look, [(v["id"], v["nodes"][0]["html"]) for v in found])
            grounds.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        tab.close()
    assert len(grounds) == 3, "light, dark and paper look the same"


# ---- Gradescope's results.json: the documented form, and nothing that a student must not see
VISIBILITIES = {"visible", "after_due_date", "after_published", "hidden"}
FORMATS = {"text", "html", "simple_format", "md", "ansi"}
#: Gradescope's *Autograder Specifications*: what a key may hold, of the whole and of a test.
WHOLE: dict[str, Any] = {
    "score": (int, float),
    "execution_time": int,
    "output": str,
    "output_format": FORMATS,
    "test_output_format": FORMATS,
    "test_name_format": FORMATS,
    "visibility": VISIBILITIES,
    "stdout_visibility": VISIBILITIES,
    "extra_data": dict,
    "tests": list,
    "leaderboard": list,
}
TEST: dict[str, Any] = {
    "score": (int, float),
    "max_score": (int, float),
    "status": {"passed", "failed"},
    "name": str,
    "name_format": FORMATS,
    "number": str,
    "output": str,
    "output_format": FORMATS,
    "tags": list,
    "visibility": VISIBILITIES,
    "extra_data": dict,
}


def assert_documented(given: dict[str, Any], allowed: dict[str, Any]) -> None:
    for key, value in given.items():
        assert key in allowed, f"{key} is no key of Gradescope's"
        kind = allowed[key]
        assert value in kind if isinstance(kind, set) else isinstance(value, kind), (key, value)


def test_the_result_has_the_documented_form():
    given = gradescope.results(result(*EVERY_OUTCOME, notes=["a note"]))
    assert json.loads(json.dumps(given)) == given
    assert_documented(given, WHOLE)
    for test in given["tests"]:
        assert_documented(test, TEST)


def test_there_is_a_test_an_exercise_that_a_student_may_see_and_nothing_that_the_grader_printed():
    given = gradescope.results(result(*EVERY_OUTCOME))
    assert [test["number"] for test in given["tests"]] == [e["number"] for e in EVERY_OUTCOME]
    assert [test["name"] for test in given["tests"]] == [e["title"] for e in EVERY_OUTCOME]
    assert [test["status"] for test in given["tests"]] == ["passed"] + ["failed"] * (len(OUTCOMES) - 1)
    assert given["score"] == sum(test["score"] for test in given["tests"]) == 10
    assert {(test["max_score"], test["visibility"]) for test in given["tests"]} == {(10, "visible")}
    assert given["stdout_visibility"] == "hidden"


def test_a_students_output_says_the_outcome_and_the_message_cut_where_it_is_huge():
    said = ("timed out", "\x1b[31mdid not end\x1b[0m"), ("passed", ""), ("crashed", "spam\n" * 2_000_000)
    late, passed, huge = (
        test["output"] for test in gradescope.results(result(*(exercise("2.1", *one) for one in said)))["tests"]
    )
    assert late == "timed out\n\ndid not end" and passed == "passed" and len(huge) < 10_000


def test_notes_stand_above_the_tests_and_an_unreadable_submission_says_so():
    given = gradescope.results(result(exercise("2.1", "not attempted"), status="unreadable", notes=["no such file"]))
    assert given["output"].split("\n") == [
        "Lab 2. Triton kernels: 0 of 10 points",
        "The submission could not be read, so no exercise was graded.",
        "no such file",
    ]
    assert given["score"] == 0


def test_a_result_of_another_version_is_refused():
    with pytest.raises(ValueError, match="outcome must be one of"):
        gradescope.results(result(exercise("2.1", "guessed")))
