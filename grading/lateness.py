"""The scores that count, once due dates, lateness and what was decided for single students are applied to results.

This happens when tables and pages are written. Stored results hold what the checks gave, so a change of ``class.toml``
runs no check again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from grading.class_folder import Class, Ungraded
from grading.feedback import points
from grading.lab import Lab
from grading.results import Verdict, result
from grading.submission import HandedIn
from grading.term import FILE, Override, Term
from grading.times import UNKNOWN, Submitted

DAY = timedelta(days=1)


def days_late(when: datetime, due: datetime, grace_minutes: float = 0) -> int:
    """Days of 24 hours begun since the due date; 0 within the grace."""
    late = when.astimezone(UTC) - due.astimezone(UTC)  # two times of one zone would be subtracted as clocks show them
    return 0 if late <= timedelta(minutes=grace_minutes) else math.ceil(late / DAY)


def prepared(term: Term, lab: Lab, everyone: Class) -> dict[str, dict[str, Any]]:
    """A result without a point for each student whose score is set and who has nothing to grade, by student.

    They join ``everyone``, and lose their line without a score. All times get the offset of the class's time zone.

    Raises:
        ValueError: a time without an offset, and no time zone.
    """
    everyone.times = {student: replace(one, when=term.moment(one)) for student, one in everyone.times.items()}
    made = {}
    for student, override in term.overrides.items():
        if override.score is None or student in everyone.handed_in:
            continue
        why = [f"{line.status}: {line.why}" for line in everyone.ungraded if line.student == student]
        verdicts = {exercise.number: Verdict("not attempted") for exercise in lab.exercises}
        made[student] = result(lab, student, "", verdicts, why or ["nothing was handed in"])
        everyone.handed_in[student] = HandedIn(student, ())
        everyone.ungraded = [line for line in everyone.ungraded if line.student != student]
    return made


def applied(term: Term, results: Mapping[str, Mapping[str, Any]], everyone: Class) -> dict[str, dict[str, Any]]:
    """Results with the scores that count, by student.

    Each has ``term``: ``status`` for the table (empty: the result's own), ``said`` to the student, ``notes`` for the
    instructor, ``submitted`` and ``due`` in ISO format (empty if not known) and ``penalty`` (points, for lateness).
    """
    return {
        student: _applied(term, one, everyone.times.get(student, UNKNOWN), term.overrides.get(student, Override()))
        for student, one in results.items()
    }


def _applied(term: Term, result: Mapping[str, Any], submitted: Submitted, override: Override) -> dict[str, Any]:
    before, reason = result["score"], f": {override.reason.rstrip('. ')}" if override.reason else ""
    when, due = submitted.when, override.due or term.due
    status, score, penalty, said, notes = "", before, 0, [], []
    if override.excused:
        status = "excused"
        said.append(f"You are excused from this lab; its score does not count{reason}.")
        notes.append(f"excused{reason}")
    elif override.score is not None:
        score = override.score
        said.append(f"Your instructor set the score to {points(score)}{reason}. The checks gave {points(before)}.")
        notes.append(f"score set to {points(score)}, {points(before)} before{reason}")
    elif due is not None:
        said.append(f"Due {term.day(due)}" + (f", extended for you{reason}." if override.due else "."))
        notes += [f"due date moved to {term.day(due)}{reason}"] if override.due else []
        status, penalty, told, noted = _lateness(term, result, submitted, due)
        score, said, notes = _number(before - penalty), [*said, *told], [*notes, *noted]
    shown = when.astimezone(term.zone) if when and term.zone else when
    return {
        **result,
        "score": score,
        "term": {
            "status": status,
            "said": said,
            "notes": notes,
            "submitted": shown.isoformat(" ", "seconds") if shown else "",
            "due": due.isoformat() if due else "",
            "penalty": _number(penalty),
        },
    }


def _number(value: float) -> float | int:
    """Points, to the hundredth."""
    value = round(value, 2)
    return int(value) if float(value).is_integer() else value


def _lateness(
    term: Term, result: Mapping[str, Any], submitted: Submitted, due: datetime
) -> tuple[str, float, list[str], list[str]]:
    """Status, penalty, what the student is told, and notes, by when a submission was handed in."""
    before, most, late = result["score"], result["max_score"], term.late
    if submitted.when is None:
        if submitted.late is False:
            return "", 0, ["Handed in on time."], []
        if late is None:
            return "", 0, [], []
        told = "It is not known here when you handed in, so no penalty is taken off."
        who = "Canvas marks it as late, and does not say when" if submitted.late else "it is not known when"
        status = "time unknown" if result["status"] == "graded" else ""
        return status, 0, [told], [f"{who} it was handed in: no penalty"]
    days = days_late(submitted.when, due, late.grace_minutes if late else 0)
    how = f"{days} {'day' if days == 1 else 'days'} late"
    told = [f"Handed in {term.day(submitted.when)}: {how if days else 'on time'}."]
    if not days or late is None:
        return "", 0, told, [f"{how} by {submitted.source}: no late policy"] if days else []
    if late.last_day is not None and days > late.last_day:
        penalty, rule = before, f"nothing counts after day {late.last_day}"
    else:
        penalty = min(before, round(days * late.percent_per_day / 100 * most, 2))
        rule = f"{late.percent_per_day:g} % of {points(most)} points for each day begun"
    final = points(before - penalty)
    told.append(f"Score {points(before)}, penalty {points(penalty)} ({rule}), final score {final}.")
    return "", penalty, told, [f"{how} by {submitted.source}: score {points(before)}, penalty {points(penalty)}"]


def lines(term: Term, ungraded: Iterable[Ungraded], graded: Iterable[str]) -> list[Ungraded]:
    """The lines without a score, with what was decided for students who have no result."""
    ungraded, graded = list(ungraded), set(graded)
    for student, override in term.overrides.items():
        if student in graded:
            continue
        mine = [line for line in ungraded if line.student == student]
        first = mine[0] if mine else Ungraded(student, f"nothing was handed in under this id of {FILE}", "missing")
        what = "excused" if override.excused else f"due date moved to {term.day(override.due)}" if override.due else ""
        why = "; ".join(filter(None, (what, override.reason, first.why)))
        status = "excused" if override.excused else first.status
        ungraded = [line for line in ungraded if line.student != student]
        ungraded.append(Ungraded(student, why, status, first.submission))
    return ungraded
