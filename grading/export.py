"""Scores for Canvas and Moodle: ``python -m grading.export grades/LAB/grades.csv EXPORTED.csv``.

``EXPORTED.csv`` is what the platform itself gives: Canvas's gradebook (*Export*), or Moodle's offline grading worksheet
(*Download grading worksheet*). What is written can be imported there: the same columns that say who a student is, one
column of scores, and a row for each student who has one. Everybody else is left as he is, and has a line in the report.

Sources: ``lib/gradebook_exporter.rb`` and ``lib/gradebook_importer.rb`` of Canvas, ``mod/assign/feedback/offline`` of
Moodle.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grading.feedback import points
from grading.roster import key
from utils.atomic_write import write_atomically

#: Columns of Canvas that are computed there, and of no use in an import.
COMPUTED = re.compile(r"(Current|Final|Override) (Score|Points|Grade|Status)")
ASSIGNMENT = re.compile(r"(?P<title>.+) \(\d+\)", re.DOTALL)
#: Columns that hold an id, best first.
CANVAS_IDS = ("SIS Login ID", "SIS User ID", "Integration ID", "ID")
MOODLE_IDS = ("Username", "ID number", "Email address", "Identifier")
IDS = 5  # these, and an e-mail address before the @
MOODLE_NEEDS = ("Identifier", "Grade", "Last modified (grade)")


@dataclass(frozen=True)
class Left:
    """A line of the report: a score that was not entered, or a person who got none."""

    student: str
    person: str
    why: str


@dataclass(frozen=True)
class Sheet:
    """What a platform exported.

    Attributes:
        platform: its name.
        head: the headings.
        rows: the students.
        column: the place of the scores.
        kept: the places of the columns that are written.
        most: the points of the assignment, if they are known.
        above: the rows between headings and students that are written.
        delimiter: what stands between two cells.
    """

    platform: str
    head: list[str]
    rows: list[list[str]]
    column: int
    kept: list[int]
    most: float | None
    above: list[list[str]]
    delimiter: str

    def person(self, row: list[str]) -> str:
        """A student's name, as the platform writes it."""
        cells = dict(zip(self.head, row))
        names = [cells.get(name, "").strip() for name in ("LastName", "FirstName")]
        return (cells.get("Student") or cells.get("Full name") or ", ".join(filter(None, names))).strip()

    def called(self, row: list[str]) -> list[str]:
        """All that a student may be called in ``grades.csv``, best first: ids, then names as files have them."""
        cells, person = dict(zip(self.head, row)), self.person(row)
        columns = CANVAS_IDS if self.platform == "Canvas" else MOODLE_IDS
        ids = [cells.get(column, "").strip() for column in columns]
        number = ids[-1].rpartition(" ")[2]  # of "Participant 12345", too
        address = ids[0] if self.platform == "Canvas" else ids[2]
        ids.append(address.partition("@")[0] if "@" in address else "")
        return [*(one.casefold() for one in ids), key(f"{person}{number}") if person else "", key(person)]

    def locked(self, row: list[str]) -> str:
        """Why this student's score must stay; empty if it can be entered."""
        cells, here = dict(zip(self.head, row)), row[self.column].strip()
        if self.platform == "Canvas" and here.upper() in ("EX", "N/A"):
            return "excused in Canvas" if here.upper() == "EX" else "not assigned to this student in Canvas"
        return "locked in Moodle" if cells.get("Grade can be changed", "").strip() == "No" else ""


def read_table(path: Path) -> tuple[list[str], list[list[str]], str]:
    """Headings, rows of the same length, and delimiter of a CSV file.

    Raises:
        ValueError: there is none, or it is not CSV in UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV in UTF-8: {error}") from error
    head = [cell.strip() for cell in rows[0]] if rows else []
    return head, [(row + [""] * len(head))[: len(head)] for row in rows[1:]], delimiter


def read_sheet(path: Path, column: str | None = None) -> Sheet:
    """Read what Canvas or Moodle exported.

    Args:
        path: the file.
        column: Canvas's assignment, such as ``"Lab 2 (1234)"``, or its title alone.

    Raises:
        ValueError: it is neither, or it has no such assignment that scores can be entered for.
    """
    head, rows, delimiter = read_table(path)
    if all(name in head for name in MOODLE_NEEDS):
        if column not in (None, "Grade"):
            raise ValueError(f"{path} is Moodle's worksheet of one assignment: leave out --column")
        most = [_number(cell) for row in rows for name, cell in zip(head, row) if name.lower() == "maximum grade"]
        place = head.index("Grade")
        return Sheet("Moodle", head, rows, place, [*range(len(head))], most[0] if most else None, [], delimiter)
    if not (head[:1] == ["Student"] or head[:2] == ["LastName", "FirstName"]) or not {"ID", "Section"} <= {*head}:
        raise ValueError(
            f"{path} is neither Canvas's gradebook (Student, ID, ..., Section, ...) nor Moodle's offline grading "
            f"worksheet ({', '.join(MOODLE_NEEDS)}, in English)"
        )
    above = [row for row in rows if "Points Possible" in row[0]]
    first = head.index("Section") + 1
    open_ = [
        place
        for place in range(first, len(head))
        if ASSIGNMENT.fullmatch(head[place])
        and not COMPUTED.search(head[place])
        and not any("read only" in row[place] for row in above)
    ]
    found = [place for place in open_ if head[place] == column]
    found = found or [place for place in open_ if ASSIGNMENT.fullmatch(head[place])["title"] == column]
    if len(found) != 1:
        raise ValueError(
            f"{path}: --column must name one of {', '.join(repr(head[place]) for place in open_) or 'none'}, "
            f"got {column!r}"
        )
    place = found[0]
    students = [
        row for row in rows if row not in above and row[head.index("ID")].strip()
    ]  # others say how it is posted
    most = _number(above[0][place]) if above else None
    return Sheet("Canvas", head, students, place, [*range(first), place], most, above, delimiter)


def read_grades(path: Path) -> list[Mapping[str, str]]:
    """The lines of ``grades.csv``.

    Raises:
        ValueError: it is another table.
    """
    head, rows, _ = read_table(path)
    if missing := {"student", "score", "max_score"} - {*head}:
        raise ValueError(f"{path} has no column {', '.join(sorted(missing))}: take grades/LAB/grades.csv")
    return [dict(zip(head, row)) for row in rows]


def entered(
    sheet: Sheet, grades: Sequence[Mapping[str, str]], *, scale: bool = False
) -> tuple[list[list[str]], list[Left]]:
    """The rows of those who have a score, with it, and what is left.

    Args:
        sheet: what the platform exported.
        grades: the lines of ``grades.csv``.
        scale: whether scores become parts of the platform's points; otherwise these must be the lab's.

    Raises:
        ValueError: the assignment has other points than the lab.
    """
    known: dict[tuple[int, str], list[int]] = {}
    for place, row in enumerate(sheet.rows):
        for rank, name in enumerate(sheet.called(row)):
            if name:
                known.setdefault((rank, name), []).append(place)
    maxima = [most for line in grades if line["score"].strip() and (most := _number(line["max_score"]))]
    lab = statistics.mode(maxima) if maxima else None
    if not scale and None not in (sheet.most, lab) and sheet.most != lab:
        raise ValueError(
            f"{sheet.head[sheet.column]!r} has {sheet.most:g} points and the lab {lab:g}: change it in "
            f"{sheet.platform} and export again, or say --scale"
        )
    factor = sheet.most / lab if scale and sheet.most and lab else 1
    left: list[Left] = []
    scores: dict[int, list[tuple[str, str]]] = {}
    named: set[int] = set()  # rows that the report has a line about
    for line in grades:
        score, places = _number(line["score"]), _places(known, line["student"])
        score = score if score is None else score * factor
        why = _why_not(sheet, line, score, places)
        if not why and score is not None and _number(line["max_score"]) != lab:
            why = f"its max_score is {line['max_score']}, and that of most {lab or 0:g}"
        if why:
            left.append(Left(line["student"], sheet.person(sheet.rows[places[0]]) if len(places) == 1 else "", why))
            named.update(places[:1] if len(places) == 1 else ())
        else:
            scores.setdefault(places[0], []).append((line["student"], "EX" if score is None else points(score)))
    rows = []
    for place, row in enumerate(sheet.rows):
        found = scores.get(place, [])
        if len(found) == 1:
            cells = [*row[: sheet.column], found[0][1], *row[sheet.column + 1 :]]
            rows.append([cells[kept] for kept in sheet.kept])
        elif found:
            left += [Left(student, sheet.person(row), "several scores are this person's") for student, _ in found]
        elif place not in named:
            left.append(Left("", sheet.person(row), "no score in grades.csv"))
    return rows, left


def _places(known: Mapping[tuple[int, str], list[int]], student: str) -> list[int]:
    """The rows that may be a student's: those that the best kind of name leads to."""
    student = re.sub(r"^'(?=[=+@-])", "", student.strip())  # as it was before grades.csv made a text of it
    forms = [(rank, student.casefold()) for rank in range(IDS)]
    forms += [(rank, key(student)) for rank in (IDS, IDS + 1)]
    return next((known[form] for form in forms if form in known), [])


def _why_not(sheet: Sheet, line: Mapping[str, str], score: float | None, places: Sequence[int]) -> str:
    """Why a score cannot be entered; empty if it can."""
    excused = score is None and line.get("status") == "excused" and sheet.platform == "Canvas"
    if score is None and not excused:
        said = f"{line['score']!r} is no score" if line["score"].strip() else line.get("status", "") or "no score"
        notes = line.get("notes") or ""
        return notes if notes.startswith(said) else ": ".join(filter(None, (said, notes)))
    if len(places) != 1:
        return f"{len(places)} people in {sheet.platform} are called so" if places else f"nobody in {sheet.platform}"
    if not excused and (score < 0 or (sheet.platform == "Moodle" and sheet.most is not None and score > sheet.most)):
        return f"{points(score)} points are out of range, which {sheet.platform} passes over"
    return sheet.locked(sheet.rows[places[0]])


def _number(text: str) -> float | None:
    """A number with a point or a comma."""
    try:
        value = float(text.strip().replace(",", "."))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _csv(rows: Sequence[Sequence[str]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n", delimiter=delimiter).writerows(rows)
    return text.getvalue().encode()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when a table was written, 2 when none could be."""
    parser = argparse.ArgumentParser(prog="python -m grading.export", description=__doc__.split("\n")[0])
    parser.add_argument("grades", type=Path, help="grades/LAB/grades.csv")
    parser.add_argument("exported", type=Path, help="what Canvas or Moodle exported")
    parser.add_argument("--column", help='Canvas\'s assignment, such as "Lab 2 (1234)"')
    parser.add_argument("--scale", action="store_true", help="the assignment there has other points than the lab")
    parser.add_argument("--out", type=Path, help="the table to import (default: EXPORTED-import.csv)")
    given = parser.parse_args(arguments)
    out = given.out or given.exported.with_name(f"{given.exported.stem}-import.csv")
    report = out.with_name(f"{out.stem}-report.csv")
    try:
        if {out.resolve(), report.resolve()} & {given.grades.resolve(), given.exported.resolve()}:
            raise ValueError("--out must be another file than those that are read")
        sheet = read_sheet(given.exported, given.column)
        rows, left = entered(sheet, read_grades(given.grades), scale=given.scale)
    except ValueError as error:
        print(f"grading.export: {error}", file=sys.stderr)
        return 2
    above = [[row[kept] for kept in sheet.kept] for row in (sheet.head, *sheet.above)]
    write_atomically(out, _csv([*above, *rows], sheet.delimiter))
    lines = [(line.student, line.person, line.why) for line in left]
    write_atomically(report, _csv([("student", sheet.platform, "why"), *lines]))
    print(f"{out}: {len(rows)} scores for {sheet.head[sheet.column]!r} in {sheet.platform}")
    print(f"{report}: why {len(left)} are not in it")
    for line in left:
        print(f"not entered: {line.student or line.person}: {line.why}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
