"""The course as data: its parts, their lectures and labs, how long each takes and what each builds on.

Everything is read where the course says it: parts from README.md's table, titles, minutes and prerequisites from the
opening block of each notebook.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from website.places import ROOT, page_of

_HOURS = re.compile(r"(?:(?:about )?(?P<hours>\d+) hours?)|(?:(?P<minutes>\d+) minutes)")
_EXERCISES = re.compile(r"and (\d+) for the exercises")
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<path>[^)]*\.ipynb)\)")


@dataclass(frozen=True)
class Lesson:
    """A lecture or a lab.

    Attributes:
        key: ``"05"`` for a lecture, ``"lab3"`` for a lab.
        title: without its number.
        page: page of the site without suffix.
        minutes: to read and run it, or to do all exercises of a lab.
        exercise_minutes: for a lecture's exercises, 0 for a lab.
        needs: keys that its "Know first" names, in reading order.
        points: of a lab's exercises, in order; empty for a lecture.
    """

    key: str
    title: str
    page: str
    minutes: int
    exercise_minutes: int
    needs: tuple[str, ...]
    points: tuple[int, ...] = ()

    @property
    def is_lab(self) -> bool:
        """Whether it is a lab."""
        return self.key.startswith("lab")

    @property
    def name(self) -> str:
        """Number and title: ``"05 Online softmax"``, ``"Lab 3 FlashAttention"``."""
        return f"{self.key.replace('lab', 'Lab ')} {self.title}"


@dataclass(frozen=True)
class Part:
    """A part of the course: ``numeral`` ("" for the capstone), name, what a student then can do, and its lessons."""

    numeral: str
    name: str
    able: str
    lessons: tuple[Lesson, ...]

    @property
    def label(self) -> str:
        """``"III. Attention"`` or ``"Capstone"``."""
        return f"{self.numeral}. {self.name}" if self.numeral else self.name


def known_first(text: str) -> tuple[str, ...]:
    """Keys of the lessons that the "Know first" line of a notebook's opening names, sorted, lectures first.

    Raises:
        ValueError: the text has no such line.
    """
    found = re.search(r"\*\*Know first:?\*\*:?(.*?)(?=\n\s*\n|\*\*Time|\Z)", text, re.DOTALL)
    if not found:
        raise ValueError(
            f'a notebook must say what to know first in a line "**Know first:** ...", this has none: {text[:60]!r}'
        )
    line = re.sub(r"\([^)]*\)", "", found[1])  # what is used of a lesson, and the addresses of links
    line = re.sub(r"\b(\d\d) to (\d\d)\b", lambda m: " ".join(f"{n:02}" for n in range(int(m[1]), int(m[2]) + 1)), line)
    lectures = re.findall(r"(?<![\d.])(\d\d)(?![\d.]\d)\b", line)
    labs = [f"lab{number}" for number in re.findall(r"\blab (\d)\b", line)]
    return tuple(sorted(set(lectures)) + sorted(set(labs)))


def minutes_of(text: str) -> tuple[int, int]:
    """Minutes that a notebook's opening states in its "Time" line: without a lecture's exercises, and for these.

    Raises:
        ValueError: the text has no such line.
    """
    found = re.search(r"\*\*Time:?\*\*:?(.*)", text)
    stated = found and _HOURS.search(found[1])
    if not stated:
        raise ValueError(
            f'a notebook must say how long it takes in a line "**Time:** ...", this does not: {text[:60]!r}'
        )
    exercises = _EXERCISES.search(found[1])
    minutes = 60 * int(stated["hours"]) if stated["hours"] else int(stated["minutes"])
    return minutes, int(exercises[1]) if exercises else 0


def _lesson(path: Path) -> Lesson:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "markdown"))
    heading = re.match(r"# (?:Lab (?P<lab>\d)\.|(?P<lecture>\d\d)) (?P<title>.+)", text)
    if not heading:
        raise ValueError(f'{path.name}: its first line must be "# 05 Title: subtitle" or "# Lab 3. Title"')
    title = heading["title"].partition(": ")[0]
    key = f"lab{heading['lab']}" if heading["lab"] else heading["lecture"]
    minutes, exercises = minutes_of(text)
    points = tuple(p for cell in cells if (p := cell["metadata"].get("nbgrader", {}).get("points")))
    return Lesson(key, title, page_of(path), minutes, exercises, known_first(text), points)


@cache
def parts() -> tuple[Part, ...]:
    """The parts in reading order, from the table "The course" in README.md.

    Raises:
        ValueError: the table, or a notebook's opening, does not say what it must.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## The course\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    if len(rows) < 3:
        raise ValueError('README.md has no table below "## The course"')
    found = []
    for first, lectures, lab, able in rows[2:]:
        numeral, _, name = first.rpartition(". ")
        lessons = [_lesson(ROOT / link["path"]) for link in _LINK.finditer(f"{lectures} {lab}")]
        found.append(Part(numeral, name, able, tuple(lessons)))
    return tuple(found)


def lessons() -> tuple[Lesson, ...]:
    """All lectures and labs in reading order."""
    return tuple(lesson for part in parts() for lesson in part.lessons)


@cache
def ancestors(key: str) -> frozenset[str]:
    """Everything that a lesson builds on, directly or not."""
    needs = next(lesson.needs for lesson in lessons() if lesson.key == key)
    return frozenset(needs).union(*map(ancestors, needs))


def direct_needs(lesson: Lesson) -> tuple[str, ...]:
    """Of what a lesson names, that which nothing else that it names builds on: the lines worth drawing."""
    return tuple(key for key in lesson.needs if not any(key in ancestors(other) for other in lesson.needs))


def hours(minutes: int) -> str:
    """``"75 min"``, ``"3 h"`` or ``"2 h 45"``."""
    whole, rest = divmod(minutes, 60)
    if not rest:
        return f"{whole} h"
    return f"{minutes} min" if minutes <= 120 else f"{whole} h {rest:02}"
