"""The list of a class, from a CSV file: who should have handed in, and by which other names each is known."""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from grading.times import parse_time

#: Columns that hold the id, best first: what Canvas, Moodle and GitHub Classroom export, and what one writes oneself.
ID_COLUMNS = ("sis login id", "username", "identifier", "student", "id number", "id", "sid")
FIRST_NAME, LAST_NAMES = "first name", ("last name", "surname")
#: Columns that say when a student handed in: one's own, and that of Moodle's grading worksheet.
TIME_COLUMNS = ("submitted", "last modified (submission)")
#: Canvas's row for the instructor's own *Student View*, with a random text or nothing for an id: not one of the class.
TEST_STUDENT = "Student, Test"
CANVAS_NUMBER = "ID"  # the column of Canvas's export whose number is in the names of downloaded files


@dataclass(frozen=True)
class Roster:
    """A class.

    Attributes:
        ids: of its students, in order.
        names: the id behind every other name that belongs to one student only.
        times: when a student handed in, where a column says so, by id.
    """

    ids: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    times: Mapping[str, datetime] = field(default_factory=dict)

    def id_of(self, names: Iterable[str]) -> str | None:
        """The student whom the first name that the roster knows belongs to."""
        for name in names:
            if name in self.ids:
                return name
            if (found := self.names.get(key(name))) is not None:
                return found
        return None


def key(name: str) -> str:
    """A name without what platforms drop or change: ``doejohn`` for ``"Doe, John"``."""
    return "".join(c for c in unicodedata.normalize("NFKC", name).casefold() if c.isalnum())


def turned(name: str) -> str:
    """The :func:`key` of a name with its last name first, or last where a comma says that it is first."""
    first, _, last = name.partition(",") if "," in name else name.rpartition(" ")
    return key(last + first)


def _names_in_two(headings: list[str], row: list[str]) -> list[tuple[str, str]]:
    """First and last name where they have a column each, as in Moodle's export; its folders have both."""
    cells = dict(zip(headings, row))
    return [(cells[FIRST_NAME], cells[last]) for last in LAST_NAMES if FIRST_NAME in cells and last in cells]


def read_roster(path: Path) -> Roster:
    """Read a roster: a column of ids, with any further columns as other names of the same student, in either order.

    With a line of headings, the ids are in the column that :data:`ID_COLUMNS` names, otherwise in the first one; a
    column that :data:`TIME_COLUMNS` names says when each student handed in.

    Raises:
        ValueError: no such file, or one that is not CSV in UTF-8, or without any id, or with a time that is none.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"the roster {path} cannot be read as CSV in UTF-8: {error}") from error
    headings = rows[0] if rows else []
    known = [heading.casefold() for heading in headings]
    column = next((known.index(name) for name in ID_COLUMNS if name in known), None)
    if column is None:
        column, headings = 0, []
    rows = [row for row in rows[1 if headings else 0 :] if len(row) > column]
    for row in rows:
        row[column] = key(TEST_STUDENT) if TEST_STUDENT in row else row[column]
    rows = [row for row in rows if row[column]]
    ids = tuple(dict.fromkeys(row[column] for row in rows if TEST_STUDENT not in row))
    if not ids:
        raise ValueError(f"the roster {path} holds no id of a student")
    owners: dict[str, set[str]] = {}
    others: dict[str, set[str]] = {}
    timed = next((known.index(name) for name in TIME_COLUMNS if headings and name in known), None)
    for row in rows:
        for position, cell in enumerate(row):
            owners.setdefault(key(cell), set()).add(row[column])
            others.setdefault(turned(cell), set()).add(row[column])
            if headings[position : position + 1] == [CANVAS_NUMBER]:
                owners.setdefault(key(f"canvas {cell}"), set()).add(row[column])
        for first, last in _names_in_two(known, row):
            owners.setdefault(key(first + last), set()).add(row[column])
    names = {name: next(iter(of)) for name, of in (others | owners).items() if name and len(of) == 1}
    names |= {key(student): student for student in reversed(ids)}
    return Roster(ids, names, {} if timed is None else _times(path, rows, column, timed))


def _times(path: Path, rows: list[list[str]], column: int, timed: int) -> dict[str, datetime]:
    """The times in a column, by the id in another; a student's last line that has one counts."""
    times = {}
    for row in rows:
        if (cell := row[timed] if len(row) > timed else "") not in ("", "-"):
            try:
                times[row[column]] = parse_time(cell)
            except ValueError as error:
                raise ValueError(f"{path}, {row[column]}: {error}") from error
    return times
