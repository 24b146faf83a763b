"""Gradescope's results.json: the documented form, and nothing that a student must not see."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_grading_feedback import EVERY_OUTCOME, exercise, result

from grading.feedback import OUTCOMES
from grading.gradescope import VISIBILITIES, results

FORMATS = {"text", "html", "simple_format", "md", "ansi"}
#: Gradescope's *Autograder Specifications*: what a key may hold, of the whole and of a test.
WHOLE: dict[str, Any] = {
    "score": (int, float),
    "execution_time": int,
    "output": str,
    "output_format": FORMATS,
    "test_output_format": FORMATS,
    "test_name_format": FORMATS,
    "visibility": set(VISIBILITIES),
    "stdout_visibility": set(VISIBILITIES),
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
    "visibility": set(VISIBILITIES),
    "extra_data": dict,
}


def assert_documented(given: dict[str, Any], allowed: dict[str, Any]) -> None:
    for key, value in given.items():
        assert key in allowed, f"{key} is no key of Gradescope's"
        kind = allowed[key]
        assert value in kind if isinstance(kind, set) else isinstance(value, kind), (key, value)


def test_the_result_has_the_documented_form():
    given = results(result(*EVERY_OUTCOME, notes=["a note"]))
    assert json.loads(json.dumps(given)) == given
    assert_documented(given, WHOLE)
    for test in given["tests"]:
        assert_documented(test, TEST)


def test_there_is_a_test_an_exercise_with_number_name_points_and_status():
    given = results(result(*EVERY_OUTCOME))
    assert [test["number"] for test in given["tests"]] == [e["number"] for e in EVERY_OUTCOME]
    assert [test["name"] for test in given["tests"]] == [e["title"] for e in EVERY_OUTCOME]
    assert [test["status"] for test in given["tests"]] == ["passed"] + ["failed"] * (len(OUTCOMES) - 1)
    assert given["score"] == sum(test["score"] for test in given["tests"]) == 10
    assert all(test["max_score"] == 10 for test in given["tests"])


def test_a_students_output_says_the_outcome_and_the_message():
    (test,) = results(result(exercise("2.1", "timed out", "\x1b[31mdid not end\x1b[0m")))["tests"]
    assert test["output"] == "timed out\n\ndid not end" and test["output_format"] == "text"
    (test,) = results(result(exercise("2.1", "passed")))["tests"]
    assert test["output"] == "passed"


def test_what_the_grader_printed_is_hidden_from_students():
    assert results(result(exercise("2.1", "passed")))["stdout_visibility"] == "hidden"


def test_notes_stand_above_the_tests_and_an_unreadable_submission_says_so():
    given = results(result(exercise("2.1", "not attempted"), status="unreadable", notes=["no such file"]))
    assert given["output"].split("\n") == [
        "Lab 2. Triton kernels: 0 of 10 points",
        "The submission could not be read, so no exercise was graded.",
        "no such file",
    ]
    assert given["score"] == 0


def test_a_huge_message_is_cut():
    (test,) = results(result(exercise("2.1", "crashed", "spam\n" * 2_000_000)))["tests"]
    assert len(test["output"]) < 10_000


def test_tests_are_shown_when_the_instructor_says_so():
    given = results(result(*EVERY_OUTCOME), visibility="after_published")
    assert given["visibility"] == "after_published" and given["stdout_visibility"] == "hidden"
    assert {test["visibility"] for test in given["tests"]} == {"after_published"}


def test_a_visibility_that_gradescope_does_not_know_is_refused():
    with pytest.raises(
        ValueError, match="must be one of visible, after_due_date, after_published, hidden, got 'never'"
    ):
        results(result(exercise("2.1", "passed")), visibility="never")
    with pytest.raises(ValueError, match="outcome must be one of"):
        results(result(exercise("2.1", "guessed")))
