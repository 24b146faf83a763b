"""A result in the form that Gradescope reads: ``results.json`` of an autograder.

Source: *Autograder Specifications*, https://gradescope-autograders.readthedocs.io/en/latest/specs/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grading.feedback import OUTCOMES, plain, points, require_known, shortened

#: When students see a test, in Gradescope's words.
VISIBILITIES = ("visible", "after_due_date", "after_published", "hidden")


def results(result: Mapping[str, Any], *, visibility: str = "visible") -> dict[str, Any]:
    """What an autograder writes for one submission: a score, and one test an exercise.

    Args:
        result: what ``LAB/results/STUDENT.json`` holds.
        visibility: when students see the tests: ``"visible"`` (at once), ``"after_due_date"``, ``"after_published"`` or
            ``"hidden"``. What the grader itself printed is never shown to them.

    Raises:
        ValueError: a visibility that Gradescope does not know, or a result that the feedback page does not know.
        KeyError: the result lacks a field.
    """
    if visibility not in VISIBILITIES:
        raise ValueError(f"visibility must be one of {', '.join(VISIBILITIES)}, got {visibility!r}")
    require_known(result)
    return {
        "score": result["score"],
        "execution_time": round(result["seconds"]),
        "output": _opening(result),
        "output_format": "text",
        "test_output_format": "text",
        "test_name_format": "text",
        "visibility": visibility,
        "stdout_visibility": "hidden",
        "tests": [_test(exercise, visibility) for exercise in result["exercises"]],
        "extra_data": {"lab": result["lab"], "digest": result["digest"], "graded": result["graded"]},
    }


def _opening(result: Mapping[str, Any]) -> str:
    """The text above the tests: the score, and the grader's notes to the student."""
    lines = [f"{result['title']}: {points(result['score'])} of {points(result['max_score'])} points"]
    if result["status"] == "unreadable":
        lines.append("The submission could not be read, so no exercise was graded.")
    return "\n".join([*lines, *(shortened(note) for note in result["notes"])])


def _test(exercise: Mapping[str, Any], visibility: str) -> dict[str, Any]:
    outcome = OUTCOMES[exercise["outcome"]]
    message = shortened(exercise["message"]).strip("\n")
    return {
        "number": exercise["number"],
        "name": " ".join(plain(exercise["title"]).split()),
        "name_format": "text",
        "score": exercise["score"],
        "max_score": exercise["max_score"],
        "status": "passed" if exercise["outcome"] == "passed" else "failed",
        "output": outcome.words + (f"\n\n{message}" if message else ""),
        "output_format": "text",
        "visibility": visibility,
    }
