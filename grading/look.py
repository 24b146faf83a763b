"""The column ``look`` of ``grades.csv``: in a few words, why an instructor should look at a submission.

A note that is a reason to look says so where it is made (:class:`Note`); no sentence is read again later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Outcomes of an exercise that are a reason to look, in the order in which they are named.
OUTCOMES = ("tampered", "refused", "crashed")
IGNORED = "ignored files"  # modules, notebooks or archives of the student's that were not graded
NO_MODULE = "no module"
SOLUTIONS = "solutions/ handed in"
COPIED = "copy of the solution"
CHECKS = "check cells edited"
STRANGER = "not in the roster"
OUTDATED = "outdated score by hand"


class Note(str):
    """A note that is a reason to look: the text, and the reason in a few words. Other notes are plain texts."""

    look: str

    def __new__(cls, text: str, look: str = "") -> Note:
        """Make a note; without ``look`` it is no reason."""
        note = super().__new__(cls, text)
        note.look = look
        return note


def looks(notes: Iterable[str]) -> list[str]:
    """The reasons to look among notes, each once."""
    return list(dict.fromkeys(note.look for note in notes if isinstance(note, Note) and note.look))


def look(result: Mapping[str, Any], notes: Iterable[str], similar: str = "") -> str:
    """The cell of a graded submission; empty when there is no reason to look.

    Args:
        result: the result as it is stored.
        notes: what is known about the submission beyond its result.
        similar: what is said about similar submissions.
    """
    if result["status"] != "graded":
        return str(result["status"])
    outcomes = {
        outcome: [one["number"] for one in result["exercises"] if one["outcome"] == outcome] for outcome in OUTCOMES
    }
    found = [f"{outcome} {', '.join(numbers)}" for outcome, numbers in outcomes.items() if numbers]
    return "; ".join([*found, *filter(None, [similar]), *dict.fromkeys([*result.get("look", ()), *looks(notes)])])
