"""nbgrader's gradebook of a class: made from the release, filled by one process from the results."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbgrader import api
from nbgrader.api import Gradebook
from nbgrader.converters import GenerateAssignment
from nbgrader.coursedir import CourseDirectory
from sqlalchemy.exc import SAWarning

from grading.lab import ROOT, Lab
from grading.nbgrader_config import course_config

# trap: nbgrader calls the program `alembic` by its bare name when it makes a gradebook
_programs = str(Path(sys.executable).parent)
if _programs not in os.environ.get("PATH", "").split(os.pathsep):
    os.environ["PATH"] = os.pathsep.join((_programs, os.environ.get("PATH", os.defpath)))

# It takes that program seconds to say the version of nbgrader's tables, which is the same for every gradebook.
api.get_alembic_version = functools.cache(api.get_alembic_version)

# nbgrader adds rows in an order that SQLAlchemy warns of, harmlessly
warnings.filterwarnings("ignore", category=SAWarning)

QUIET = logging.getLogger("grading.nbgrader")


def register(gradebook: Path, lab: Lab, scratch: Path, course: Path = ROOT) -> None:
    """Put a lab, its check cells and their points into a gradebook; nothing changes when they are there already.

    nbgrader does it, by generating the assignment; the release itself goes to ``scratch``.

    Raises:
        NbGraderException: the lab's check cells are not those that submissions in the gradebook were graded with.
    """
    config = course_config(scratch, gradebook, course)
    config.CourseDirectory.assignment_id = lab.name
    config.CourseDirectory.ignore = config.GenerateAssignmentApp.CourseDirectory.ignore
    shutil.rmtree(scratch / "labs" / lab.name, ignore_errors=True)
    scratch.mkdir(parents=True, exist_ok=True)
    converter = GenerateAssignment(coursedir=CourseDirectory(config=config), config=config)
    converter.log = QUIET
    converter.start()


def scores(gradebook: Path, lab: Lab, student: str) -> dict[str, float]:
    """The points of each exercise in a gradebook.

    Raises:
        MissingEntry: no such submission.
    """
    numbers = {exercise.grade_id: exercise.number for exercise in lab.exercises}
    with Gradebook(f"sqlite:///{gradebook}") as book:
        notebook = book.find_submission_notebook(lab.name, lab.name, student)
        return {numbers[grade.name]: grade.score for grade in notebook.grades}


def merge(gradebook: Path, lab: Lab, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Enter results by student into the class's gradebook. Doing it again changes nothing.

    What a person entered in the formgrader (a manual score, extra credit, a comment) stays.
    """
    with Gradebook(f"sqlite:///{gradebook}") as book:
        for student, result in results.items():
            book.update_or_create_student(student)
            book.update_or_create_submission(lab.name, student)
            by_id = {f"check-{e['number'].replace('.', '-')}": e for e in result["exercises"]}
            for grade in book.find_submission_notebook(lab.name, lab.name, student).grades:
                score = float(by_id[grade.name]["score"])
                if grade.auto_score != score or grade.needs_manual_grade:
                    # a manual score wins over ours; nbgrader then asks the instructor to look again
                    grade.needs_manual_grade = grade.manual_score is not None and grade.auto_score != score
                    grade.auto_score = score
            book.db.commit()


def keep_submission(files: Mapping[str, bytes], destination: Path) -> None:
    """Keep what a student handed in where nbgrader looks for submissions: the formgrader counts them by it."""
    with tempfile.TemporaryDirectory(prefix=f"mlf-{os.getpid()}-") as scratch:
        for name, content in files.items():
            (Path(scratch) / name).write_bytes(content)
        put_folder(Path(scratch), destination)


def put_folder(source: Path, destination: Path) -> None:
    """Make ``destination`` a copy of ``source``; whoever looks finds the old folder or the new one in full."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (destination.parent / f".{destination.name}.{end}" for end in ("new", "old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(source, fresh)
    if destination.exists():
        os.rename(destination, old)
    os.rename(fresh, destination)
    shutil.rmtree(old, ignore_errors=True)
