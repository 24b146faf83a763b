"""A lab's notebook as the tests of every lab read it, and what each of them must keep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient


class LabNotebook:
    """The hand-written notebook of a lab: its tasks and check cells by exercise (``"2.4"``)."""

    def __init__(self, path: Path) -> None:
        self.cells = nbformat.read(path, as_version=4).cells
        self.check_cells = {c.metadata.nbgrader.grade_id: c for c in self.cells if "nbgrader" in c.metadata}

    @property
    def opening(self) -> str:
        """The first cell: what the lab is about and what it promises."""
        return self.cells[0].source

    def text_of(self, exercise: str) -> str:
        """The markdown that poses an exercise."""
        return next(c.source for c in self.cells if c.source.startswith(f"## Exercise {exercise}:"))

    def check_cell(self, exercise: str) -> nbformat.NotebookNode:
        """The cell that checks an exercise."""
        return self.check_cells["check-" + exercise.replace(".", "-")]

    def classic_numbers(self, exercise: str) -> list[int]:
        """The numbers in an exercise's list of classic wrong answers."""
        listed = self.text_of(exercise).split("Classic wrong answers")[1]
        return [int(number) for number in re.findall(r"^(\d+)\. ", listed, flags=re.MULTILINE)]

    def assert_graded_and_locked(self, exercise: str) -> None:
        """The check cell is what the grader expects: points (0 if voluntary), an id of its own, locked."""
        grading = dict(self.check_cell(exercise).metadata.nbgrader)
        assert grading.pop("points") >= 0
        assert grading == {
            "grade": True,
            "grade_id": "check-" + exercise.replace(".", "-"),
            "locked": True,
            "schema_version": 3,
            "solution": False,
            "task": False,
        }

    def assert_points_add_up(self, exercises: Iterable[str]) -> None:
        """As many points as the opening promises, each exercise's beside its task, and no check cell beyond them."""
        exercises = list(exercises)
        assert len(self.check_cells) == len(exercises)
        total = sum(cell.metadata.nbgrader.points for cell in self.check_cells.values())
        assert f"{total} points in all" in self.opening
        for exercise in exercises:
            points = self.check_cell(exercise).metadata.nbgrader.points
            assert f"· {points} points ·" in self.text_of(exercise), exercise

    def assert_minutes_add_up(self, exercises: Iterable[str]) -> None:
        """The minutes of the exercises with points make the promised hours, to a quarter of an hour."""
        texts = [text for text in map(self.text_of, exercises) if "· 0 points ·" not in text]
        minutes = sum(int(re.search(r"· (\d+) minutes ·", text).group(1)) for text in texts)
        promised = int(re.search(r"about (\d+) hours?", self.opening).group(1))
        assert abs(minutes - 60 * promised) <= 15

    def assert_task_check_and_notice_follow(self, exercise: str) -> None:
        """The check follows the task (and a cell that profiles what it is about); then what to notice."""
        text = self.text_of(exercise)
        index = next(i for i, cell in enumerate(self.cells) if cell.source == text)
        follow = [cell for cell in self.cells[index + 1 : index + 4] if not cell.id.startswith("profile-")]
        assert follow[0] is self.check_cell(exercise)
        assert follow[1].source.startswith("**When it passes, notice.**")


def assert_released_notebook_stops_at_each_check(
    path: Path, first: Mapping[str, str], whole: Iterable[str] = ("setup", "imports"), left_out: str | None = None
) -> None:
    """As a student opens it: in labs/, through a kernel, before anything is solved.

    Args:
        path: the released notebook, named ``labN_topic.ipynb``.
        first: exercise -> the exercise whose own message its check must meet first.
        whole: cells that must run without an error.
        left_out: the beginning of the ids of cells that are not run.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if left_out is None or not cell.id.startswith(left_out)]
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=120, allow_errors=True, resources=where).execute()
    lab = path.name[len("lab")]
    for exercise, met in first.items():
        cell = next(c for c in notebook.cells if c.id == "check-" + exercise.replace(".", "-"))
        error = next(output for output in cell.outputs if output.output_type == "error")
        assert (error.ename, error.evalue.split(":")[0]) == ("NotImplementedError", f"Lab {lab}, exercise {met}")
    failed = {cell.id for cell in notebook.cells for output in cell.get("outputs", ()) if output.output_type == "error"}
    assert failed.isdisjoint(whole)
