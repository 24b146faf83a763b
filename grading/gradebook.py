"""nbgrader's gradebook of a class, written from the results: nbgrader shows and exports them, and runs nothing."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbgrader import api
from nbgrader.api import Grade, Gradebook, MissingEntry
from nbgrader.utils import parse_utc
from sqlalchemy.exc import SAWarning

from grading import nbgrader_config, outputs
from grading.lab import Lab
from utils.atomic_write import write_atomically

nbgrader_config.find_programs()
# `alembic` takes seconds to name the version of nbgrader's tables, which is the same for every gradebook.
api.get_alembic_version = functools.cache(api.get_alembic_version)

# nbgrader adds rows in an order that SQLAlchemy warns about, harmlessly
warnings.filterwarnings("ignore", category=SAWarning)


@dataclass(frozen=True)
class Correction:
    """A score that a person entered; ``outdated`` when the automatic one has changed since."""

    score: float
    outdated: bool


def register(gradebook: Path, lab: Lab, skip: Collection[str] = ()) -> None:
    """Put a lab, its check cells and their points into a gradebook; nothing changes if they are there already.

    Args:
        gradebook: nbgrader's.
        lab: the lab.
        skip: numbers of exercises that are not assigned: their cells have no points.

    Raises:
        ValueError: the gradebook holds submissions that were graded with other exercises.
    """
    with Gradebook(f"sqlite:///{gradebook}") as book:
        assignment = book.update_or_create_assignment(lab.name)
        notebook = book.update_or_create_notebook(lab.name, lab.name)
        known, wanted = {cell.name for cell in notebook.grade_cells}, {e.grade_id for e in lab.exercises}
        if known != wanted and assignment.submissions:
            raise ValueError(
                f"{gradebook} holds submissions graded with other exercises ({', '.join(sorted(known ^ wanted))} "
                "differ): choose another --out, or move the gradebook away"
            )
        if known - wanted:
            book.remove_notebook(lab.name, lab.name)
            book.update_or_create_notebook(lab.name, lab.name)
        for exercise in lab.exercises:
            points = 0 if exercise.number in skip else exercise.points
            book.update_or_create_grade_cell(exercise.grade_id, lab.name, lab.name, max_score=points, cell_type="code")


def scores(gradebook: Path, lab: Lab, student: str) -> dict[str, float]:
    """The points of each exercise in a gradebook.

    Raises:
        MissingEntry: no such submission.
    """
    numbers = {exercise.grade_id: exercise.number for exercise in lab.exercises}
    with Gradebook(f"sqlite:///{gradebook}") as book:
        notebook = book.find_submission_notebook(lab.name, lab.name, student)
        return {numbers[grade.name]: grade.score for grade in notebook.grades}


def corrections(gradebook: Path, lab: Lab) -> dict[str, dict[str, Correction]]:
    """The scores that people entered in the formgrader, by student and exercise number: extra credit counts too."""
    numbers = {exercise.grade_id: exercise.number for exercise in lab.exercises}
    found: dict[str, dict[str, Correction]] = {}
    with Gradebook(f"sqlite:///{gradebook}") as book:
        by_hand = Grade.manual_score.isnot(None) | Grade.extra_credit.isnot(None)
        for grade in book.db.query(Grade).filter(by_hand):
            if grade.assignment.name == lab.name and grade.name in numbers:
                correction = Correction(grade.score, bool(grade.needs_manual_grade))
                found.setdefault(grade.student.id, {})[numbers[grade.name]] = correction
    return found


def enter(out: Path, lab: Lab, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Enter results by student into the gradebook in ``out``, and write the notebooks that the formgrader shows.

    Entering them again changes nothing. What a person entered in the formgrader (a manual score, extra credit, a
    comment) stays; where the automatic score has changed since, nbgrader asks for a second look. An exercise that is
    not in a result has no points.
    """
    released = nbformat.read(lab.notebook, as_version=4)
    with Gradebook(f"sqlite:///{out / 'gradebook.db'}") as book:
        for student, result in results.items():
            exercises = {exercise["number"]: exercise for exercise in result["exercises"]}
            by_id = {one.grade_id: exercises[one.number] for one in lab.exercises if one.number in exercises}
            path = outputs.autograded_path(out, lab, student) / lab.notebook.name
            write_atomically(path, nbformat.writes(_with_verdicts(released, by_id)).encode())
            book.update_or_create_student(student)
            book.update_or_create_submission(lab.name, student)
            for grade in book.find_submission_notebook(lab.name, lab.name, student).grades:
                score = float(by_id[grade.name]["score"]) if grade.name in by_id else 0.0
                if grade.auto_score != score:
                    grade.needs_manual_grade = grade.manual_score is not None
                    grade.auto_score = score
            book.db.commit()


def enter_term(gradebook: Path, lab: Lab, results: Mapping[str, Mapping[str, Any]], due: datetime | None) -> None:
    """Enter the due date, and for each student the time of submission, the extension and what was taken off.

    What is taken off is nbgrader's penalty for lateness, and with it points typed for an exercise that is not assigned.
    Where a score was set above what the checks gave, it is below zero. So the score that nbgrader exports is the one
    that counts.

    Args:
        gradebook: nbgrader's.
        lab: the lab.
        results: by student, from :func:`grading.lateness.applied`.
        due: the lab's due date; None leaves the one that is there.
    """
    with Gradebook(f"sqlite:///{gradebook}") as book:
        assignment = book.update_or_create_assignment(lab.name, **({"duedate": due} if due else {}))
        for student, result in results.items():
            term = result["term"]
            with contextlib.suppress(MissingEntry):
                submission = book.find_submission(lab.name, student)
                submission.timestamp, mine = _utc(term["submitted"]), _utc(term["due"])
                submission.extension = mine - assignment.duedate if due and mine != assignment.duedate else None
                for notebook in submission.notebooks:
                    notebook.late_submission_penalty = round(notebook.score - result["score"], 2)
        book.db.commit()


def _utc(text: str) -> datetime | None:
    """A time in ISO format as nbgrader keeps it, or None where there is none, or no offset."""
    when = datetime.fromisoformat(text) if text else None
    return parse_utc(when) if when is not None and when.tzinfo is not None else None


def _with_verdicts(notebook: NotebookNode, by_id: Mapping[str, Mapping[str, Any]]) -> NotebookNode:
    """The released notebook, in place, with what became of each exercise as the output of its check cell."""
    for cell in notebook.cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
        if grade_id in by_id:
            cell.outputs = [_output(by_id[grade_id])]
    return notebook


def _output(exercise: Mapping[str, Any]) -> NotebookNode:
    """One output in a form that nbgrader itself would score the same: text for full points, an error for none."""
    if exercise["outcome"] == "passed":
        return nbformat.v4.new_output("stream", name="stdout", text="passed\n")
    text = exercise["message"] or exercise["outcome"]
    name = exercise["outcome"].title().replace(" ", "")
    return nbformat.v4.new_output("error", ename=name, evalue=text, traceback=text.split("\n"))
