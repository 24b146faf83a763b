"""The class grader on lab 1 without running anything: full marks for whatever can be read and keeps the rules."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from grading import grade, outputs, worker
from grading.lab import find_lab
from grading.results import Verdict, write_json
from grading.verdicts import exercises_in

LAB = find_lab("lab1")


def without_running(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the grader give full marks for whatever it can read, without running it; whom it graded is listed.

    What is written in a module that breaks the rules is refused, as ever.
    """
    worked: list[str] = []

    def run_all(job, pending: Mapping, out: Path, jobs: int) -> Iterator[str]:
        for student, (one, digest) in pending.items():
            worked.append(student)
            result = worker.grade(job, one, digest, outputs.submitted_path(out, LAB, student))
            write_json(outputs.result_path(out, LAB, student), result)
            yield student

    def verdicts(self) -> dict[str, Verdict]:
        self._lay_out()
        refused = {number: one for name, one in self.left_out.items() for number in exercises_in(LAB, name)}
        return {exercise.number: Verdict("passed") for exercise in LAB.exercises} | refused

    monkeypatch.setattr(worker._Grading, "verdicts", verdicts)
    monkeypatch.setattr(grade, "run_all", run_all)
    monkeypatch.setattr(grade, "_grader_digest", lambda lab: "this grader")
    monkeypatch.setattr(grade, "similar_in", lambda lab, folders, together: [])
    return worked


def run(folder: Path, *more: str) -> int:
    """Grade a folder of submissions into ``grades`` beside it."""
    out = folder.parent / "grades"
    return grade.main(["lab1", "--submissions", str(folder), "--out", str(out), "--no-sandbox", *more])


def rows(folder: Path) -> dict[str, dict[str, str]]:
    """The lines of ``grades.csv``, by student."""
    with open(folder.parent / "grades" / LAB.name / "grades.csv", newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len({line["student"] for line in lines}) == len(lines)
    return {line["student"]: line for line in lines}
