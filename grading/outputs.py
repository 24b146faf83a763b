"""Everything that is made of results: pages, Gradescope's files, the table and ``grades.csv``; and where each lies."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grading.archives import shown
from grading.class_folder import Ungraded
from grading.feedback import page, plain
from grading.gradescope import results as gradescope_results
from grading.lab import Lab
from grading.look import look
from grading.results import read_result, write_json
from grading.similar import Similar, words
from grading.submission import HandedIn
from utils.atomic_write import write_atomically

SYMBOLS = {"passed": "✓", "failed": "✗", "not attempted": "·", "refused": "R", "timed out": "T", "crashed": "C"}
NO_TERM = {"status": "", "notes": [], "submitted": "", "penalty": 0}
MAX_CELL = 4000  # characters of a cell in ``grades.csv``
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


def similar_path(out: Path, lab: Lab) -> Path:
    """The pairs of similar submissions."""
    return out / lab.name / "similar.csv"


def kept_results(out: Path, lab: Lab, students: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The stored results of these students, as far as they have the lab's exercises."""
    numbers = [exercise.number for exercise in lab.exercises]
    found = {student: read_result(result_path(out, lab, student)) for student in students}
    return {
        student: result
        for student, result in found.items()
        if result is not None and [exercise["number"] for exercise in result["exercises"]] == numbers
    }


def publish(out: Path, lab: Lab, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write each student's feedback page and Gradescope's file."""
    folder = out / lab.name
    for student, result in results.items():
        write_atomically(folder / "feedback" / f"{student}.html", page(result).encode())
        write_json(folder / "gradescope" / f"{student}.json", gradescope_results(result))


def write_csv(
    out: Path,
    lab: Lab,
    results: Mapping[str, Mapping[str, Any]],
    handed_in: Mapping[str, HandedIn],
    ungraded: Iterable[Ungraded],
    similar: Iterable[Similar] = (),
) -> None:
    """Write ``grades.csv``: a line for each student and for everything that was not graded, without a score there.

    Args:
        out: the folder of grades.
        lab: the lab.
        results: by student.
        handed_in: what the results were made from, by student.
        ungraded: the lines of all others.
        similar: pairs of similar submissions, for the column ``look``.
    """
    rows, alike = {}, words(similar)
    for student, result in results.items():
        points = [exercise["score"] for exercise in result["exercises"]]
        names = ", ".join(shown(path.name) for _, path in handed_in[student].paths)
        term = NO_TERM | result.get("term", {})
        notes = [*handed_in[student].notes, *term["notes"], *_by_hand(result), *result["notes"], *_private(result)]
        score = "" if term["status"] == "excused" else result["score"]
        late = [term["submitted"], term["penalty"] or ""]
        seen = look(result, handed_in[student].notes, alike.get(student, ""))
        texts = [term["status"] or result["status"], names, seen, "; ".join(notes)]
        rows[student, ""] = [score, result["max_score"], *points, *late, *texts]
    blank = [""] * (4 + len(lab.exercises))
    for line in ungraded:
        seen = line.status if line.status == "not graded" else ""
        rows[line.student, line.submission] = [*blank, line.status, line.submission, seen, line.why]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ["student", "score", "max_score", *(exercise.number for exercise in lab.exercises)]
    writer.writerow([*head, "submitted", "penalty", "status", "submission", "look", "notes"])
    for (student, _), (*numbers, status, names, seen, notes) in sorted(rows.items()):
        writer.writerow([_cell(student), *numbers, status, _cell(names), _cell(seen), _cell(notes)])
    write_atomically(out / lab.name / "grades.csv", text.getvalue().encode())


def write_similar(out: Path, lab: Lab, pairs: Iterable[Similar]) -> None:
    """Write ``similar.csv``: a line for each direction of each pair, in the order of ``pairs``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in dataclasses.fields(Similar)])
    for pair in pairs:
        percents = [pair.percent, pair.percent_of_other]
        pieces = [pair.longest_lines, pair.longest_at, pair.other_at]
        writer.writerow([_cell(pair.student), _cell(pair.similar_to), *percents, ", ".join(pair.files), *pieces])
    write_atomically(similar_path(out, lab), text.getvalue().encode())


def _by_hand(result: Mapping[str, Any]) -> list[str]:
    """A note for each score that a person changed."""
    changed = [one for one in result["exercises"] if "automatic" in one]
    return [f"{one['number']} has {one['score']:g} points by hand, {one['automatic']:g} automatic" for one in changed]


def _private(result: Mapping[str, Any]) -> list[str]:
    """A note for each error of which the student is told less, since it may hold hidden inputs."""
    return [f"{e['number']} raised on hidden inputs: {e['private']}" for e in result["exercises"] if "private" in e]


def table(lab: Lab, results: Mapping[str, Mapping[str, Any]], ungraded: Iterable[Ungraded] = ()) -> str:
    """A line a student: the score, and a sign for each exercise; below them, what has no score."""
    width = max([len("student"), *map(len, results)])
    head = f"{'student':<{width}}  score  " + " ".join(f"{e.number:>4}" for e in lab.exercises)
    lines = [head, "-" * len(head)]
    for student, result in sorted(results.items()):
        signs = " ".join(f"{SYMBOLS.get(exercise['outcome'], '!'):>4}" for exercise in result["exercises"])
        status = result.get("term", NO_TERM)["status"] or result["status"]
        said = f"  {status}" if status != "graded" else ""
        lines.append(f"{student:<{width}}  {result['score']:>5}  {signs}{said}")
    lines += [f"{line.student:<{width}}      -  {line.status}: {line.why}" for line in ungraded]
    lines.append("✓ passed  ✗ failed  · not attempted  R refused  T timed out  C crashed  ! tampered")
    return "\n".join(lines)


def write_config(out: Path) -> None:
    """Write the configuration that makes ``nbgrader`` at home in the folder of grades."""
    write_atomically(out / "nbgrader_config.py", CONFIG.encode())


def _cell(text: str) -> str:
    """A text of one line that a spreadsheet takes for a text, not for a formula."""
    line = " ".join(plain(text).split())
    line = line if len(line) <= MAX_CELL else f"{line[:MAX_CELL]} ..."
    return f"'{line}" if line[:1] in ("=", "+", "-", "@") else line
