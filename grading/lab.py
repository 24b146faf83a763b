"""A lab as the grader sees it: its exercises with their points, read from the notebook, and where its files lie."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXERCISES = "exercises"  # the folder of a lab that holds its checks
HANDED_OUT = Path("labs", ".handed_out")  # in the students' copy of the course: each lab as it was handed out
HEADING = re.compile(r"^## Exercise (?P<number>\d+\.\d+): (?P<title>.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Exercise:
    """One exercise: ``number`` as students see it (``"2.1"``), its points, and the check cell that decides on them."""

    number: str
    title: str
    points: float
    grade_id: str
    source: str

    @property
    def voluntary(self) -> bool:
        """Whether it is without points: it is checked like the others, and nobody minds if it is not attempted."""
        return self.points == 0


@dataclass(frozen=True)
class Lab:
    """One lab: ``released`` is the folder that students get, ``solution`` the one it is made from.

    The students' copy of the course has no solutions: there, ``solution`` holds the lab as it was handed out.
    """

    name: str
    title: str
    exercises: tuple[Exercise, ...]
    released: Path
    solution: Path

    @property
    def number(self) -> int:
        """``2`` for ``lab2_triton_kernels``."""
        return int(re.match(r"lab(\d+)_", self.name)[1])

    @property
    def notebook(self) -> Path:
        """The notebook that students get."""
        return self.released / f"{self.name}.ipynb"

    @property
    def max_score(self) -> float:
        """The points of all exercises."""
        return sum(exercise.points for exercise in self.exercises)

    def exercise(self, number: str) -> Exercise:
        """The exercise of that number.

        Raises:
            ValueError: the lab has none of that number.
        """
        for exercise in self.exercises:
            if exercise.number == number:
                return exercise
        raise ValueError(f"{self.name} has no exercise {number}, but {', '.join(e.number for e in self.exercises)}")


def checks_of(lab: Lab) -> dict[str, Path]:
    """The course's own checks of a lab, as a sandbox shows them: path below the course -> folder."""
    return {f"labs/{lab.name}/{EXERCISES}": lab.released / EXERCISES}


def lab_names(root: Path = ROOT) -> list[str]:
    """The labs of the course in ``root``, in order: the packages with a notebook."""
    return sorted(path.stem for path in _sources(root).glob("lab*_*/lab*_*.ipynb") if path.stem == path.parent.name)


def _sources(root: Path) -> Path:
    """Where the labs are made from: the solutions, or in the students' copy what was handed out."""
    return root / HANDED_OUT if (root / HANDED_OUT).is_dir() else root / "solutions"


def find_lab(text: str, root: Path = ROOT) -> Lab:
    """The lab that ``text`` names: ``"2"``, ``"lab2"`` or ``"lab2_triton_kernels"``.

    Raises:
        ValueError: no lab, or a notebook whose check cells and exercises do not go together.
    """
    names = lab_names(root)
    wanted = [name for name in names if text in (name, name.split("_")[0], name.split("_")[0].removeprefix("lab"))]
    if len(wanted) != 1:
        raise ValueError(f"no lab {text!r}; there are {', '.join(names)}")
    name = wanted[0]
    released, solution = root / "labs" / name, _sources(root) / name
    cells = json.loads((solution / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    title = "".join(cells[0]["source"]).split("\n", 1)[0].removeprefix("# ").strip()
    exercises = tuple(_exercises(name, cells))
    if not exercises:
        raise ValueError(f"{name}: no check cell carries points")
    return Lab(name, title, exercises, released, solution)


def _exercises(name: str, cells: list[Mapping[str, Any]]) -> Iterator[Exercise]:
    number = heading = None
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and (found := HEADING.search(source)):
            number, heading = found["number"], found["title"]
        grading = cell["metadata"].get("nbgrader")
        if not grading or not grading["grade"]:
            continue
        if number is None or heading is None or grading["grade_id"] != "check-" + number.replace(".", "-"):
            raise ValueError(f"{name}: the check cell {grading['grade_id']!r} does not follow its exercise's text")
        yield Exercise(number, heading, grading["points"], grading["grade_id"], source)
