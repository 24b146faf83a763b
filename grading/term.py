"""``class.toml`` of a class: due dates, what lateness costs, and what was decided for single students."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, time, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from grading.class_folder import wrong_id
from grading.lab import Lab, find_lab, lab_names
from grading.roster import Roster
from grading.times import Submitted

FILE = "class.toml"
NUMBER, DATE = (int, float), (datetime, date)
WORDS = {
    NUMBER: "a number",
    int: "a whole number",
    DATE: "a date",
    bool: "true or false",
    list: "a list",
    str: "a text",
    dict: "a table",
}


@dataclass(frozen=True)
class Late:
    """What lateness costs.

    Attributes:
        percent_per_day: of the lab's points, for each day begun after the due date.
        grace_minutes: up to here, a submission is not late.
        last_day: what is later by more days than this has no points; None if there is no such day.
    """

    percent_per_day: float
    grace_minutes: float = 0
    last_day: int | None = None


@dataclass(frozen=True)
class Override:
    """What was decided for one student: another due date, a score, or that the lab does not count."""

    due: datetime | None = None
    score: float | None = None
    excused: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Term:
    """What ``class.toml`` says of one lab; empty without such a file. ``skip`` are exercises that are not assigned."""

    zone: tzinfo | None = None
    due: datetime | None = None
    late: Late | None = None
    overrides: Mapping[str, Override] = field(default_factory=dict)
    skip: frozenset[str] = frozenset()

    def assigned(self, lab: Lab) -> Lab:
        """The lab with the exercises that are assigned."""
        return replace(lab, exercises=tuple(one for one in lab.exercises if one.number not in self.skip))

    def day(self, when: datetime) -> str:
        """A time in words, where the class is."""
        when = when.astimezone(self.zone) if self.zone else when
        return f"{when.day} {when:%B %Y, %H:%M} {when.tzname() or ''}".strip()

    def moment(self, submitted: Submitted) -> datetime | None:
        """When something was handed in, with the offset of the class's time zone if it had none.

        Raises:
            ValueError: it has none, and there is no time zone.
        """
        when = submitted.when
        if when is None or when.tzinfo is not None:
            return when
        if self.zone is None and self.due is not None:
            raise ValueError(
                f"{when} in {submitted.source} has no offset such as +01:00: write it, or put "
                f'timezone = "Europe/Berlin" at the top of {FILE}'
            )
        return when.replace(tzinfo=self.zone)


# ---- the file ------------------------------------------------------------------------------------------------------


def read_term(path: Path, lab: Lab, roster: Roster | None = None) -> Term:
    """What ``class.toml`` says of a lab, about students by their ids in the roster, whichever name of theirs it uses.

    Raises:
        ValueError: it cannot be read, or says anything that is not known here, about whichever lab; or it has a student
            twice, under two names.
    """
    if not path.is_file():
        return Term()
    try:
        whole = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        return _term(whole, lab, roster or Roster())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _term(whole: dict[str, Any], lab: Lab, roster: Roster) -> Term:
    names = {spelling: name for name in lab_names() for spelling in (name, name.split("_")[0])}
    top = _table("", whole, {"timezone": str, "late": dict} | dict.fromkeys(names, dict))
    zone = _zone(top.pop("timezone", None))
    late = _late(top.pop("late")) if "late" in top else None
    terms = {}
    for spelling, table in top.items():
        if names[spelling] in terms:
            raise ValueError(f"{names[spelling]} is there twice, as {spelling} too")
        given = _table(spelling, table, {"due": DATE, "skip": list, "students": dict})
        skip = _skip(spelling, given.get("skip", []), find_lab(names[spelling]))
        most = Term(skip=skip).assigned(lab).max_score
        due = _due(f"{spelling}.due", given["due"], zone) if "due" in given else None
        students = given.get("students", {})
        overrides = {name: _override(f"{spelling}.students.{name}", one, zone) for name, one in students.items()}
        for student, one in overrides.items():
            if wrong := wrong_id(student):
                raise ValueError(f"{spelling}.students: {student!r} is no id: {wrong}")
            if one.due is not None and due is None:
                raise ValueError(f"{spelling}.students.{student} has a due date, and {spelling} itself has none")
            if names[spelling] == lab.name and one.score is not None and one.score > most:
                raise ValueError(f"{spelling}.students.{student}.score: the lab has {most:g} points, got {one.score:g}")
        by_id: dict[str, Override] = {}
        for student, one in overrides.items():
            id_ = roster.id_of([student]) or student
            if id_ in by_id:
                raise ValueError(f"{spelling}.students: {student!r} is a second name of {id_}, who is there already")
            by_id[id_] = one
        terms[names[spelling]] = Term(zone, due, late, by_id, skip)
    return terms.get(lab.name, Term(zone))


def _table(where: str, table: object, known: Mapping[str, Any]) -> dict[str, Any]:
    """A table of the file, if each of its keys is known and has a value of the right kind."""
    place = f"{where}." if where else ""
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table, got {table!r}")
    for name, value in table.items():
        if name not in known:
            raise ValueError(f"{place}{name} is not known; there are {', '.join(known)}")
        kind = known[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{place}{name} must be {WORDS[kind]}, got {value!r}")
    return dict(table)


def _skip(spelling: str, numbers: list[object], lab: Lab) -> frozenset[str]:
    """The exercises that are not assigned."""
    known = [exercise.number for exercise in lab.exercises]
    for number in numbers:
        if number not in known:
            listed = ", ".join(known)
            raise ValueError(f"{spelling}.skip: there is no exercise {number!r}, but {listed}, each as a text")
    if len(set(numbers)) == len(known):
        raise ValueError(f"{spelling}.skip: no exercise is left")
    return frozenset(numbers)


def _zone(name: str | None) -> tzinfo | None:
    try:
        return ZoneInfo(name) if name is not None else None
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f'timezone must be one such as "Europe/Berlin", got {name!r}') from error


def _late(table: object) -> Late:
    given = _table("late", table, {"percent_per_day": NUMBER, "grace_minutes": NUMBER, "last_day": int})
    if "percent_per_day" not in given:
        raise ValueError("late needs percent_per_day; without a penalty, leave out [late]")
    for name, most in (("percent_per_day", 100), ("grace_minutes", math.inf), ("last_day", math.inf)):
        if not 0 <= given.get(name, 0) <= most or not math.isfinite(given.get(name, 0)):
            raise ValueError(f"late.{name} must be between 0 and {most:g}, got {given[name]!r}")
    return Late(**given)


def _due(where: str, value: date, zone: tzinfo | None) -> datetime:
    """A due date; a day alone ends at 23:59:59."""
    when = value if isinstance(value, datetime) else datetime.combine(value, time(23, 59, 59))
    if when.tzinfo is None and zone is None:
        raise ValueError(
            f'{where} has no offset: write {when.isoformat()}+01:00, say, or timezone = "Europe/Berlin" at the top'
        )
    return when if when.tzinfo is not None else when.replace(tzinfo=zone)


def _override(where: str, table: object, zone: tzinfo | None) -> Override:
    given = _table(where, table, {"due": DATE, "score": NUMBER, "excused": bool, "reason": str})
    what = [name for name in given if name != "reason"]
    if len(what) != 1:
        raise ValueError(f"{where}: give one of due, score and excused, got {', '.join(what) or 'none'}")
    if "score" in given and not given.get("reason", "").strip():
        raise ValueError(f"{where}: a score needs a reason, which the student reads")
    if given.get("score", 0) < 0 or not math.isfinite(given.get("score", 0)):
        raise ValueError(f"{where}.score must be at least 0, got {given['score']!r}")
    if given.get("excused") is False:
        raise ValueError(f"{where}: leave it out, or say excused = true")
    if "due" in given:
        given["due"] = _due(f"{where}.due", given["due"], zone)
    return Override(**given)
