"""Everything that is made of results: pages, Gradescope's files, the table and ``grades.csv``; and where each lies."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grading.feedback import page
from grading.gradescope import results as gradescope_results
from grading.lab import Lab
from grading.results import read_result, write_json
from utils.atomic_write import write_atomically

SYMBOLS = {"passed": "✓", "failed": "✗", "not attempted": "·", "refused": "R", "timed out": "T", "crashed": "C"}
CONFIG = '''"""nbgrader's configuration in this folder of grades: nbgrader finds the gradebook by it."""

from pathlib import Path

from grading.nbgrader_config import grades_config

get_config().merge(grades_config(Path(__file__).resolve().parent))  # noqa: F821 (nbgrader provides get_config)
'''


def result_path(out: Path, lab: Lab, student: str) -> Path:
    """The stored result of a submission."""
    return out / lab.name / "results" / f"{student}.json"


def log_path(out: Path, lab: Lab, student: str) -> Path:
    """What the grader printed while it graded a submission."""
    return out / lab.name / "logs" / f"{student}.log"


def autograded_path(out: Path, lab: Lab, student: str) -> Path:
    """Where nbgrader looks for the graded notebook of a submission."""
    return out / "autograded" / student / lab.name


def submitted_path(out: Path, lab: Lab, student: str) -> Path:
    """What was read of a submission, where nbgrader looks for it."""
    return out / "submitted" / student / lab.name


def publish(out: Path, lab: Lab, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write each student's feedback page and Gradescope's file, and ``grades.csv``."""
    folder = out / lab.name
    for student, result in results.items():
        write_atomically(folder / "feedback" / f"{student}.html", page(result).encode())
        write_json(folder / "gradescope" / f"{student}.json", gradescope_results(result))
    write_csv(out, lab)


def write_csv(out: Path, lab: Lab) -> None:
    """Write ``grades.csv``: a line for each student with a result, a column for each exercise."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = [exercise.number for exercise in lab.exercises]
    writer.writerow(["student", "score", "max_score", *numbers, "status"])
    for path in sorted((out / lab.name / "results").glob("*.json")):
        result = read_result(path)
        if result is not None and [exercise["number"] for exercise in result["exercises"]] == numbers:
            points = [exercise["score"] for exercise in result["exercises"]]
            row = [_cell(result["student"]), result["score"], result["max_score"], *points, result["status"]]
            writer.writerow(row)
    write_atomically(out / lab.name / "grades.csv", text.getvalue().encode())


def table(lab: Lab, results: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a student: the score, and a sign for each exercise."""
    width = max([len("student"), *map(len, results)])
    head = f"{'student':<{width}}  score  " + " ".join(f"{e.number:>4}" for e in lab.exercises)
    lines = [head, "-" * len(head)]
    for student, result in sorted(results.items()):
        signs = " ".join(f"{SYMBOLS.get(exercise['outcome'], '!'):>4}" for exercise in result["exercises"])
        unreadable = "  unreadable" if result["status"] == "unreadable" else ""
        lines.append(f"{student:<{width}}  {result['score']:>5}  {signs}{unreadable}")
    lines.append("✓ passed  ✗ failed  · not attempted  R refused  T timed out  C crashed  ! tampered")
    return "\n".join(lines)


def write_config(out: Path) -> None:
    """Write the configuration that makes ``nbgrader`` at home in the folder of grades."""
    write_atomically(out / "nbgrader_config.py", CONFIG.encode())


def _cell(text: str) -> str:
    """A text that a spreadsheet takes for a text, not for a formula."""
    return f"'{text}" if text[:1] in "=+-@" else text
