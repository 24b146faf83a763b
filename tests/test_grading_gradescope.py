"""Gradescope's results.json: the documented form, and nothing that a student must not see."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_grading_feedback import EVERY_OUTCOME, exercise, result

from grading.feedback import OUTCOMES
from grading.gradescope import results

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
    given = results(result(*EVERY_OUTCOME, notes=["a note"]))
    assert json.loads(json.dumps(given)) == given
    assert_documented(given, WHOLE)
    for test in given["tests"]:
        assert_documented(test, TEST)


def test_there_is_a_test_an_exercise_that_a_student_may_see_and_nothing_that_the_grader_printed():
    given = results(result(*EVERY_OUTCOME))
    assert [test["number"] for test in given["tests"]] == [e["number"] for e in EVERY_OUTCOME]
    assert [test["name"] for test in given["tests"]] == [e["title"] for e in EVERY_OUTCOME]
    assert [test["status"] for test in given["tests"]] == ["passed"] + ["failed"] * (len(OUTCOMES) - 1)
    assert given["score"] == sum(test["score"] for test in given["tests"]) == 10
    assert {(test["max_score"], test["visibility"]) for test in given["tests"]} == {(10, "visible")}
    assert given["stdout_visibility"] == "hidden"


def test_a_students_output_says_the_outcome_and_the_message_cut_where_it_is_huge():
    said = ("timed out", "\x1b[31mdid not end\x1b[0m"), ("passed", ""), ("crashed", "spam\n" * 2_000_000)
    late, passed, huge = (test["output"] for test in results(result(*(exercise("2.1", *one) for one in said)))["tests"])
    assert late == "timed out\n\ndid not end" and passed == "passed" and len(huge) < 10_000


def test_notes_stand_above_the_tests_and_an_unreadable_submission_says_so():
    given = results(result(exercise("2.1", "not attempted"), status="unreadable", notes=["no such file"]))
    assert given["output"].split("\n") == [
        "Lab 2. Triton kernels: 0 of 10 points",
        "The submission could not be read, so no exercise was graded.",
        "no such file",
    ]
    assert given["score"] == 0


def test_a_result_of_another_version_is_refused():
    with pytest.raises(ValueError, match="outcome must be one of"):
        results(result(exercise("2.1", "guessed")))
