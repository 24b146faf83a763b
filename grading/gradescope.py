"""A result in the form that Gradescope reads: ``results.json`` of an autograder.

Gradescope takes results from an autograder only. ``python -m grading.gradescope grades/LAB`` packs one that runs
nothing: it hands each submission the result that was made here.

Source: *Autograder Specifications* and *Submission Metadata*, https://gradescope-autograders.readthedocs.io/en/latest/.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grading.archives import zipped
from grading.export import read_grades
from grading.feedback import OUTCOMES, by_hand, is_left, plain, points, require_known, shortened
from utils.atomic_write import write_atomically

SETUP = "#!/usr/bin/env bash\napt-get update && apt-get install -y python3\n"
RUN = '''#!/usr/bin/env python3
"""Hand the submission the result that was made for it elsewhere."""

import json
import pathlib
import shutil
import sys

place = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "/autograder")
number = json.loads((place / "submission_metadata.json").read_text())["id"]
made, wanted = place / "source" / "results" / f"{number}.json", place / "results" / "results.json"
if made.is_file():
    shutil.copy(made, wanted)
else:
    wanted.write_text(json.dumps({"score": 0, "output": "This submission has not been graded yet."}))
'''


def results(result: Mapping[str, Any]) -> dict[str, Any]:
    """What an autograder writes for one submission: a score, and one test an exercise, which students see at once.

    A voluntary exercise that was not attempted has no test. What the grader itself printed is never shown to students.

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
        "tests": [_test(exercise) for exercise in result["exercises"] if not is_left(exercise)],
        "extra_data": {"lab": result["lab"], "digest": result["digest"], "graded": result["graded"]},
    }


def _opening(result: Mapping[str, Any]) -> str:
    """The text above the tests: the score, and the grader's notes to the student."""
    lines = [f"{result['title']}: {points(result['score'])} of {points(result['max_score'])} points"]
    if result["status"] == "unreadable":
        lines.append("The submission could not be read, so no exercise was graded.")
    return "\n".join([*lines, *map(shortened, [*result.get("term", {}).get("said", ()), *result["notes"]])])


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


def packed(folder: Path) -> tuple[bytes, dict[str, str]]:
    """The autograder of a graded lab as a zip file, and why a line of ``grades.csv`` is not in it, by student.

    Args:
        folder: ``grades/LAB``; the submissions must come from Gradescope's export, whose folders have their numbers.

    Raises:
        ValueError: there is no ``grades.csv`` in it.
    """
    scripts = {"setup.sh": SETUP.encode(), "run_autograder": RUN.encode()}
    files, left = dict(scripts), {}
    made = {path.stem: path for path in (folder / "gradescope").glob("*.json")}
    for line in read_grades(folder / "grades.csv"):
        numbers = re.findall(r"(?<!\S)submission_(\d+)(?=,|$)", line.get("submission", ""))
        mine = made.get(line["student"]) or made.get(line["student"].removeprefix("'"))  # which made a text of it
        if not line["score"].strip():
            left[line["student"]] = line.get("status") or "no score"
        elif not numbers:
            left[line["student"]] = "its submission is not from Gradescope's export (submission_12345)"
        elif mine is None:
            left[line["student"]] = "there is no file for Gradescope: grade again"
        else:
            theirs = {f"results/{number}.json": mine.read_bytes() for number in numbers}
            if any(_score(files.get(name, data)) != _score(data) for name, data in theirs.items()):
                left[line["student"]] = "its group has another score, and Gradescope takes one for all: set it there"
            else:
                files |= theirs
    return zipped(files, executable=scripts), left


def _score(made: bytes) -> float:
    return json.loads(made)["score"]


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m grading.gradescope grades/LAB``; 2 if it holds no grades."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1:
        print("usage: python -m grading.gradescope grades/LAB", file=sys.stderr)
        return 2
    folder = Path(given[0])
    try:
        content, left = packed(folder)
    except ValueError as error:
        print(f"grading.gradescope: {error}", file=sys.stderr)
        return 2
    write_atomically(folder / "gradescope-autograder.zip", content)
    print(f"{folder / 'gradescope-autograder.zip'}: all but {len(left)} lines of grades.csv")
    for student, why in left.items():
        print(f"not in it: {student}: {why}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
