"""A result in the form that Gradescope reads: ``results.json`` of an autograder.

Source: *Autograder Specifications*, https://gradescope-autograders.readthedocs.io/en/latest/specs/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grading.feedback import OUTCOMES, by_hand, plain, points, require_known, shortened


def results(result: Mapping[str, Any]) -> dict[str, Any]:
    """What an autograder writes for one submission: a score, and one test an exercise, which students see at once.

    What the grader itself printed is never shown to them.

    Args:
        result: what ``LAB/results/STUDENT.json`` holds.

    Raises:
        ValueError: a result that the feedback page does not know.
        KeyError: the result lacks a field.
    """
    require_known(result)
    return {
        "score": result["score"],
        "execution_time": round(result["seconds"]),
        "output": _opening(result),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": [_test(exercise) for exercise in result["exercises"]],
        "extra_data": {"lab": result["lab"], "digest": result["digest"], "graded": result["graded"]},
    }


def _opening(result: Mapping[str, Any]) -> str:
    """The text above the tests: the score, and the grader's notes to the student."""
    lines = [f"{result['title']}: {points(result['score'])} of {points(result['max_score'])} points"]
    if result["status"] == "unreadable":
        lines.append("The submission could not be read, so no exercise was graded.")
    return "\n".join([*lines, *(shortened(note) for note in result["notes"])])


def _test(exercise: Mapping[str, Any]) -> dict[str, Any]:
    outcome = OUTCOMES[exercise["outcome"]]
    message = shortened(exercise["message"]).strip("\n")
    full = exercise["score"] >= exercise["max_score"] if "automatic" in exercise else exercise["outcome"] == "passed"
    return {
        "number": exercise["number"],
        "name": " ".join(plain(exercise["title"]).split()),
        "name_format": "text",
        "score": exercise["score"],
        "max_score": exercise["max_score"],
        "status": "passed" if full else "failed",
        "output": outcome.words + by_hand(exercise).replace(",", "; points", 1) + (f"\n\n{message}" if message else ""),
        "output_format": "text",
        "visibility": "visible",
    }
