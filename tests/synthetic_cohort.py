"""A class of synthetic submissions to a lab, each with the grade that it must get.

Right answers, partial ones, wrong answers (:data:`MOST` of an exercise, at most one an exercise in a submission), and
the hostile ones. That each check refuses every wrong answer is shown without the grader, in ``test_exercises.py``.
What comes to the same in every lab is in the class of one lab only (:data:`GENERAL`), or of one of each kind
(:data:`KINDS`).
"""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hostile.files
import hostile.leaving
import hostile.names_from_text
import hostile.notebooks
import hostile.out_of_hearing
import hostile.ready_made
import hostile.tampering
import hostile.telling_apart  # noqa: F401
from hostile import ALL, BRIEF, HOSTILE, NEEDS, TARGETS, Hostile, honest, left_open, write
from lab_answers import answers, classic_number, edited, wrong_answers
from lab_answers import exercise as exercise_of
from lab_places import write_lab

from grading.handed_out import modules_of
from grading.lab import Lab
from grading.verdicts import exercises_in
from utils.checks.answers import WrongAnswer

FAILED = ("failed", "timed out", "crashed")

GENERAL = 1
"""The lab whose class holds the general hostile submissions: its own are the quickest to grade."""


OF_A_KIND = ("correct-with-helpers", "raises-on-import", "functions-deleted")
"""Submissions that come to the same in all labs of plain Python, of kernels, and of ranks."""

KINDS = (1, 2, 4)
"""One lab of each kind, whose classes hold :data:`OF_A_KIND`."""

MOST = 3
"""Wrong answers of an exercise in the class: a lab's longest list makes as many submissions, of up to a minute each."""


@dataclass(frozen=True)
class Lost:
    """Why an exercise scores nothing: the outcomes that it may have, and what the student must read."""

    outcomes: tuple[str, ...] = ()
    reason: str = "."


@dataclass(frozen=True)
class Member:
    """One student: what each exercise must come to.

    ``lost`` are the exercises that score nothing; ``open`` those that a wrong answer elsewhere may take along; all
    others score in full.
    """

    student: str
    lost: Mapping[str, Lost] = field(default_factory=dict)
    open: frozenset[str] = frozenset()
    hostile: bool = False

    def complaints(self, lab: Lab, result: Mapping[str, Any] | None) -> list[str]:
        """What is not as it must be in this student's result."""
        if result is None:
            return ["no result"]
        found = []
        notes = "\n".join(result["notes"])
        for exercise in result["exercises"]:
            number, score, outcome = exercise["number"], exercise["score"], exercise["outcome"]
            lost = self.lost.get(number)
            said = f"{number}: {outcome}, {score:g} points: {' '.join(exercise['message'].split())[:160]}"
            if number in self.open:
                continue
            if lost is None:
                if score != exercise["max_score"] or outcome != "passed":
                    found.append(f"should pass, but {said}")
            elif score != 0 or (lost.outcomes and outcome not in lost.outcomes):
                found.append(f"should be {' or '.join(lost.outcomes) or 'lost'}, but {said}")
            elif not re.search(lost.reason, f"{exercise['message']}\n{notes}", re.DOTALL):
                found.append(f"should say {lost.reason!r}, but {said}")
        total = sum(exercise["score"] for exercise in result["exercises"])
        if result["score"] != total or len(result["exercises"]) != len(lab.exercises):
            found.append(f"{result['score']} points in all for exercises that make {total}")
        return found


def build(lab: Lab, folder: Path, only: Iterable[str] | None = None) -> list[Member]:
    """Write the class into a new folder, one entry a student.

    Args:
        lab: the lab.
        folder: where to.
        only: the students to write; by default all but those that another lab of the same kind has.
    """
    folder.mkdir(parents=True)
    wanted = None if only is None else set(only)
    left_out = set() if lab.number in KINDS else set(OF_A_KIND)
    members = []
    for member, make in (*_answers(lab), *_wrong(lab), *_hostile(lab)):
        if member.student not in left_out if wanted is None else member.student in wanted:
            make(folder / member.student)
            members.append(member)
    if wanted is not None and (unknown := wanted - {member.student for member in members}):
        raise ValueError(f"no such student of {lab.name}: {', '.join(sorted(unknown))}")
    return members


# ---- right and partial answers


def _answers(lab: Lab) -> Iterable[tuple[Member, Any]]:
    written = Lost(("not attempted",))
    everything = {exercise.number: written for exercise in lab.exercises}
    yield Member("correct"), lambda folder: honest(folder, lab, solved=True)
    if lab.number == GENERAL:
        yield Member("correct-in-a-zip"), lambda folder: _zip(folder, lab)
    yield Member("correct-with-helpers"), lambda folder: _with_helpers(folder, lab)
    yield Member("untouched", everything), lambda folder: shutil.copytree(lab.released, folder)
    partial = _without({TARGETS[lab.number]}, lab)
    yield Member("partial", partial), lambda folder: honest(folder, lab)
    numbers = exercises_in(lab, TARGETS[lab.number])
    others = _without(left_open(lab, BRIEF.get(lab.number)), lab)
    for name, error, make in (
        ("raises-on-import", r"cannot be imported \(line \d+\): ZeroDivisionError[^\n]*counts\.", _raises),
        ("functions-deleted", r"cannot be imported: ImportError: cannot import name[^\n]*counts\.", _deleted),
    ):
        yield (
            Member(name, others | dict.fromkeys(numbers, Lost(("failed",), error))),
            lambda folder, make=make: make(folder, lab),
        )
    if lab.number > 1:
        plain = answers(lab.name).right
        yield Member("plain"), lambda folder: _write(lab, folder, plain)


def _without(modules: Iterable[str], lab: Lab) -> dict[str, Lost]:
    """What is lost where these modules are as they were handed out."""
    modules = set(modules)
    along = [e.number for e in lab.exercises if not modules.isdisjoint(NEEDS.get(e.number, ()))]
    lost = dict.fromkeys(along, Lost())  # in whatever way
    for module in modules:
        lost |= dict.fromkeys(exercises_in(lab, module), Lost(("not attempted",)))
    return lost


def _zip(folder: Path, lab: Lab) -> None:
    inside = folder / "handed in" / "labs" / lab.name
    honest(inside, lab, solved=True)
    shutil.make_archive(str(folder), "zip", folder)
    shutil.rmtree(folder)


def _raises(folder: Path, lab: Lab) -> None:
    honest(folder, lab, only=BRIEF.get(lab.number))
    with (folder / TARGETS[lab.number]).open("a", encoding="utf-8") as file:
        file.write("\n\nprint(1 / 0)  # just to see\n")


def _deleted(folder: Path, lab: Lab) -> None:
    honest(folder, lab, only=BRIEF.get(lab.number))
    (folder / TARGETS[lab.number]).write_text("# I did not get to this one.\n", encoding="utf-8")


def _with_helpers(folder: Path, lab: Lab) -> None:
    """A student who prints, asserts, adds functions and classes, and tries the module out below it."""
    honest(folder, lab, solved=True)
    path = folder / TARGETS[lab.number]
    path.write_text(
        path.read_text(encoding="utf-8")
        + textwrap.dedent(
            '''

            import itertools
            import math as m
            from dataclasses import dataclass, field
            from typing import Any


            @dataclass
            class Notes:
                """What I tried."""

                seen: dict[str, Any] = field(default_factory=dict)

                def __len__(self) -> int:
                    return len(self.seen)

                def __getitem__(self, key: str) -> Any:
                    return self.seen[key]


            def ceiling(a: float, b: float) -> int:
                """Rounded up."""
                try:
                    assert b > 0, f"b is {b}"
                    return m.ceil(a / b)
                except ZeroDivisionError as error:
                    print(type(error).__name__, error)
                    raise


            notes = Notes()
            notes.seen["pairs"] = [ceiling(a, b) for a, b in itertools.product((1, 2), (3, 4))]
            print("imported", len(notes), max(notes["pairs"], key=lambda value: -value))

            if __name__ == "__main__":
                print(notes)
            '''
        ),
        encoding="utf-8",
    )


def _write(lab: Lab, folder: Path, answers: Mapping[str, str]) -> None:
    write_lab(lab.name, folder, answers)
    shutil.copyfile(lab.notebook, folder / lab.notebook.name)


# ---- wrong answers: the k-th of every exercise in the k-th submission


def _wrong(lab: Lab) -> Iterable[tuple[Member, Any]]:
    taken_along = _leaning(lab)
    for index, pack in enumerate(_packs(lab)):
        unwritten = _unwritten(lab, index, pack)
        lost = {each.exercise: Lost(FAILED, "|".join([*map(re.escape, each.says), "notebook draws"])) for each in pack}
        also = frozenset().union(*(taken_along[number] for each in pack for number in _touched(each)))
        also |= {number for each in pack for number in _touched(each)}
        both = {number: Lost((*FAILED, "not attempted")) for number in lost if number in _others(lost, taken_along)}
        left = dict.fromkeys(unwritten, Lost((*FAILED, "not attempted")))
        member = Member(f"wrong-{index + 1:02}", lost | both | left, also - set(lost) - unwritten)
        yield member, lambda folder, pack=pack, left=unwritten: _write_places(lab, folder, pack, left)


def _unwritten(lab: Lab, index: int, pack: Sequence[Any]) -> frozenset[str]:
    """The exercises that a submission of wrong answers leaves as they were handed out: most solve what these build on.

    That a wrong answer costs no other exercise its points is shown by every eighth, which solves all others.
    """
    if index % 8 == 0:
        return frozenset()
    needed: set[str] = set()
    more = set().union(*map(_touched, pack))
    while more:
        needed |= more
        more = {other for number in more for other in exercise_of(number).builds_on} - needed
    return frozenset(one.number for one in lab.exercises if one.number not in needed)


def in_class(lab: Lab) -> list[WrongAnswer]:
    """The wrong answers of the class, edits of places all: the first for each classic number, then others, in order."""
    chosen = []
    for exercise in lab.exercises:
        written = [wrong for wrong in wrong_answers(lab.name, exercise.number) if wrong.edits]
        first = {number: wrong for wrong in reversed(written) if (number := classic_number(wrong))}
        chosen += sorted(written, key=lambda wrong: wrong not in first.values())[:MOST]
    return chosen


def _packs(lab: Lab) -> list[list[Any]]:
    """The wrong answers, at most one an exercise in a pack, and none that edits what another one in it edits."""
    packs: list[list[Any]] = []
    for answer in in_class(lab):
        touched = _touched(answer)
        for pack in packs:
            if all(touched.isdisjoint(_touched(other)) for other in pack):
                pack.append(answer)
                break
        else:
            packs.append([answer])
    return packs


def _touched(answer: Any) -> set[str]:
    """The exercises whose places a wrong answer edits."""
    return {answer.exercise, *(place.split(":")[0] for place in answer.edits)}


def _others(lost: Iterable[str], taken_along: Mapping[str, frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*(taken_along[number] for number in lost))


def _leaning(lab: Lab) -> dict[str, frozenset[str]]:
    """For each exercise those that a mistake in it may take along: in its modules, or in modules that import them."""
    uses = {path.name: _neighbours(path, lab) for path in modules_of(lab.solution)}
    for _ in uses:
        uses = {name: found.union(*(uses.get(f, frozenset()) for f in found)) for name, found in uses.items()}
    homes = {
        e.number: {name for name in uses if e.number in exercises_in(lab, name)} | {*NEEDS.get(e.number, ())}
        for e in lab.exercises
    }
    return {
        number: frozenset(
            other
            for other, places in homes.items()
            if other != number and any(place in mine or mine & uses[place] for place in places)
        )
        for number, mine in homes.items()
    }


def _neighbours(path: Path, lab: Lab) -> frozenset[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    return frozenset(f"{node.module}.py" for node in nodes if node.level == 1 and node.module)


def _write_places(lab: Lab, folder: Path, chosen: Sequence[Any], unwritten: frozenset[str]) -> None:
    """Plain answers with the edits of each of the chosen, without those to the exercises that are unwritten."""
    places = edited(lab.name)
    for answer in chosen:
        places = answer.filled(places)
    _write(lab, folder, {label: text for label, text in places.items() if label.split(":")[0] not in unwritten})


# ---- hostile ones: every sixteenth solves all else, every eighth a little, the others nothing


def _hostile(lab: Lab) -> Iterable[tuple[Member, Any]]:
    chosen = [each for each in HOSTILE if lab.number in each.labs and (lab.number == GENERAL or not each.general)]
    for index, each in enumerate(chosen):
        only = None if index % 16 == 0 or each.loses != "target" else BRIEF.get(lab.number) if index % 8 == 0 else ()
        only = only if lab.number in BRIEF else None
        only = () if each.module else only
        yield _expected(each, lab, only), lambda folder, each=each, only=only: write(folder, lab, each, only)


def _expected(each: Hostile, lab: Lab, only: Sequence[str] | None = None) -> Member:
    lost: dict[str, Lost] = {}
    if each.loses == "target":
        lost = _without(left_open(lab, only), lab)
        numbers = exercises_in(lab, each.module or TARGETS[lab.number])
    else:
        numbers = [exercise.number for exercise in lab.exercises] if each.loses == ALL else []
    return Member(each.name, lost | dict.fromkeys(numbers, Lost(each.outcomes, each.reason)), hostile=True)
