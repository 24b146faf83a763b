"""Who handed in what: the entries of a folder of submissions, as people and platforms name them.

Known are a folder or an archive named after the student, and what these leave when a class is downloaded: Canvas,
Moodle, Gradescope, GitHub Classroom, and nbgrader with its exchange. Every entry ends as a submission or as a line
that says why it is none; none of them stops the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from grading.archives import UnreadableSubmission, archive_stem, is_other_archive, shown
from grading.lab import Lab
from grading.look import STRANGER, Note
from grading.roster import Roster, read_roster
from grading.submission import HandedIn, collect
from grading.times import UNKNOWN, Submitted, folder_time, gradescope_times, latest, said

MAX_ID = 100
FORBIDDEN = "/\\\0\n+*?[]{}"

#: doejohn_LATE_12345_678910_lab1-1.zip: name, user, attachment; -1 is the first resubmission.
CANVAS = re.compile(
    r"(?P<name>.+?)(?P<late>_late)?_(?P<number>\d+)_((?P<attachment>\d+)_(?P<file>.+)|(text|link)\.html)", re.IGNORECASE
)
RESUBMITTED = re.compile(r"-\d+(?=(\.tar)?\.\w+$)")
#: Jane Doe_12345_assignsubmission_file_, a folder or the beginning of a file's name.
MOODLE = re.compile(r"(?P<name>.+)_(?P<number>\d+)_assignsubmission_(?P<kind>[a-z]+)_?(?P<file>.*)", re.DOTALL)
#: ada+lab1_roofline+2026-11-21 12:30:00.123456 UTC, with or without a random ending.
EXCHANGE = re.compile(r"(?P<name>.+)\+(?P<lab>[^+]+)\+(?P<when>\d{4}-\d\d-\d\d[^+]*)(\+[^+]*)?")
GRADESCOPE = "submission_metadata.yml"
TIMES = "times.csv"  # the instructor's own, beside the submissions


@dataclass(frozen=True)
class Ungraded:
    """A line of the table without a score: a student, or an entry of the folder that is no submission."""

    student: str
    why: str
    status: str = "not graded"
    submission: str = ""


@dataclass
class Class:
    """The submissions by student with the time of each, and everything in the folder that cannot be graded."""

    handed_in: dict[str, HandedIn] = field(default_factory=dict)
    times: dict[str, Submitted] = field(default_factory=dict)
    ungraded: list[Ungraded] = field(default_factory=list)


@dataclass(frozen=True)
class _Entry:
    """One entry of the folder.

    Attributes:
        path: the folder or file.
        student: the id that its name gives.
        names: all that its student may be called, best first.
        number: the platform's number of the student, which tells two of one name apart.
        part: which submission it is a part of; entries of one submission are graded together.
        inside: its name in that submission.
        order: of two with the same ``inside``, or of two timestamps, the greater one is the newer.
        lab: the assignment, where the name has it.
        submitted: when it was handed in, as far as the platform says.
    """

    path: Path
    student: str
    names: tuple[str, ...]
    number: str = ""
    part: str = ""
    inside: str = ""
    order: str = ""
    lab: str = ""
    submitted: Submitted = UNKNOWN


def find_submissions(folder: Path, lab: Lab, roster: Roster | None = None) -> Class:
    """Every submission in ``folder``, by student.

    Raises:
        ValueError: ``folder`` is none, or its ``times.csv`` cannot be read.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder of submissions: {folder}" + " (unpack it first)" * folder.is_file())
    known, found = roster or Roster(), Class()
    entries: list[_Entry] = []
    metadata = folder / GRADESCOPE
    text = metadata.read_text(encoding="utf-8", errors="replace") if metadata.is_file() else ""
    groups, created = _gradescope_groups(text), gradescope_times(text)
    tables = (_given_times(folder / TIMES), known)
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in (GRADESCOPE, TIMES, "__MACOSX"):
            continue
        try:
            entries += _entries(path, lab, groups, created)
        except ValueError as error:
            found.ungraded.append(Ungraded(shown(path.name), str(error), submission=shown(path.name)))
    for student, theirs in _by_student(entries, known).items():
        one = _one(student, theirs, lab)
        if isinstance(one, Ungraded):
            found.ungraded.append(one)
            continue
        notes = [Note("not in the roster", STRANGER)] if roster is not None and student not in roster.ids else []
        if any(len(groups.get(entry.path.name, ())) > 1 for entry in theirs):
            notes.append("handed in by a group: each member has a line")
        found.handed_in[student] = replace(one, notes=(*one.notes, *notes))
        counted = {path for _, path in one.paths}
        found.times[student] = _time(student, [entry for entry in theirs if entry.path in counted], tables)
    listed = found.handed_in.keys() | {line.student for line in found.ungraded}
    missing = [student for student in known.ids if student not in listed]
    found.ungraded += [Ungraded(student, "nothing was handed in", "missing") for student in missing]
    return found


def _given_times(path: Path) -> Roster:
    """The instructor's table of times, empty if there is none."""
    if not path.is_file():
        return Roster()
    table = read_roster(path)
    if not table.times:
        raise ValueError(f"{path} needs a line of headings with the columns student and submitted, and a time")
    return table


def _time(student: str, entries: Sequence[_Entry], tables: Iterable[Roster]) -> Submitted:
    """When a student handed in: what a table of the instructor's says, otherwise the platform."""
    names = [student, *(name for entry in entries for name in entry.names)]
    given = (table.times.get(table.id_of(names) or "") for table in tables)
    when = next(filter(None, given), None)
    return Submitted(when, "your table of times") if when else latest(entry.submitted for entry in entries)


def _entries(
    path: Path, lab: Lab, groups: Mapping[str, Sequence[tuple[str, ...]]], created: Mapping[str, Submitted]
) -> Iterator[_Entry]:
    """What an entry of the folder is: one for each student of a group, otherwise one.

    Raises:
        ValueError: it is no submission; the text says why.
    """
    name, stem = path.name, archive_stem(path.name)
    is_folder = path.is_dir()
    if not os.access(path, os.R_OK | (os.X_OK if is_folder else 0), effective_ids=True):
        raise ValueError("it cannot be read: you lack the permission (chmod -R u+rX), or a link leads nowhere")
    if is_folder and name in groups:
        for names in groups[name]:
            yield _Entry(path, names[0], names, part=name, submitted=created.get(name, UNKNOWN))
    elif found := MOODLE.fullmatch(name):
        file = "" if is_folder and found["kind"] == "file" else found["file"] or found["kind"]
        part, student = f"moodle {found['number']}", found["name"].strip()
        names = (f"Participant {found['number']}", f"{student}_{found['number']}", student)
        yield _Entry(path, student, names, found["number"], part, file)
    elif is_folder and (found := EXCHANGE.fullmatch(name)):
        when = said(found["when"], "nbgrader")
        who = found["name"]
        yield _Entry(path, who, (who,), part=name, order=found["when"], lab=found["lab"], submitted=when)
    elif not is_folder and (found := CANVAS.fullmatch(name)):
        names = (f"canvas {found['number']}", f"{found['name']}_{found['number']}", found["name"])
        part, order = f"canvas {found['number']}", (found["attachment"] or "").rjust(20, "0")
        inside = RESUBMITTED.sub("", found["file"]) if found["file"] else name
        late = Submitted(None, "Canvas", found["late"] is not None)
        yield _Entry(path, found["name"], names, found["number"], part, inside, order, submitted=late)
    elif is_folder or stem is not None:
        student = name if stem is None or is_folder else stem
        short = _without_prefix(student, path.parent.name, lab) if is_folder else student
        when = folder_time(path, lab.name) if is_folder and not path.is_symlink() else UNKNOWN
        yield _Entry(path, short, (student, short), part=name, submitted=when)
    elif is_other_archive(name):
        raise ValueError("only .zip and .tar archives can be opened (.tar.gz, .tar.bz2 and .tar.xz too)")
    else:
        raise ValueError("a single file does not say whose it is: put it into a folder named after the student")


def _without_prefix(name: str, parent: str, lab: Lab) -> str:
    """``jdoe`` for GitHub Classroom's folder ``lab1-jdoe``, by the lab's name or that of ``lab1-submissions``."""
    assignments = {lab.name, lab.name.split("_")[0]}
    if parent.endswith("-submissions"):
        assignments.add(parent.removesuffix("-submissions"))
    spelled = {spelling for each in assignments for spelling in (each, each.replace("_", "-"))}
    for start in sorted(spelled, key=len, reverse=True):
        if name.lower().startswith(f"{start.lower()}-") and len(name) > len(start) + 1:
            return name[len(start) + 1 :]
    return name


def _gradescope_groups(text: str) -> dict[str, list[tuple[str, ...]]]:
    """Who handed in each folder of a Gradescope export: all names of each student, best first."""
    people: dict[str, list[dict[str, str]]] = {}
    current: list[dict[str, str]] = []
    among_submitters = False
    for line in text.splitlines():
        if found := re.fullmatch(r"(\w+):\s*", line):
            current = people.setdefault(found[1], [])
        elif found := re.match(r" {2}:(\w+):", line):
            among_submitters = found[1] == "submitters"
        elif among_submitters and (found := re.fullmatch(r" +(- )?:(name|sid|email): *(.*)", line)):
            if found[1]:
                current.append({})
            if current and (value := found[3].strip().strip("'\"")):
                current[-1][found[2]] = value
    groups = {}
    for folder, students in people.items():
        named = [
            tuple(filter(None, (one.get("sid"), one.get("email", "").split("@")[0], one.get("email"), one.get("name"))))
            for one in students
        ]
        if any(named):
            groups[folder] = [names for names in named if names]
    return groups


def _by_student(entries: Iterable[_Entry], roster: Roster) -> dict[str, list[_Entry]]:
    """The entries by student: the roster's id, otherwise the name, with the platform's number where two share it."""
    entries = list(entries)
    listed = {entry: roster.id_of(entry.names) for entry in entries}
    numbers: dict[str, set[str]] = {}
    for entry in entries:
        if listed[entry] is None and entry.number:
            numbers.setdefault(entry.student, set()).add(entry.number)
    found: dict[str, list[_Entry]] = {}
    for entry in entries:
        shared = entry.number and len(numbers.get(entry.student, ())) > 1
        student = listed[entry] or (f"{entry.student}_{entry.number}" if shared else entry.student)
        found.setdefault(student, []).append(entry)
    return dict(sorted(found.items()))


def _one(student: str, entries: Sequence[_Entry], lab: Lab) -> HandedIn | Ungraded:
    """The submission of a student that counts, or why there is none."""
    names = _names(entries)
    if wrong := wrong_id(student):
        return Ungraded(shown(student), wrong, submission=names)
    mine = [entry for entry in entries if entry.lab in ("", lab.name, lab.name.split("_")[0])]
    if not mine:
        return Ungraded(student, "handed in for another assignment only", "missing", names)
    parts: dict[str, list[_Entry]] = {}
    for entry in mine:
        parts.setdefault(entry.part, []).append(entry)
    notes = [f"{_names([entry])} was not graded: it is of another assignment" for entry in entries if entry not in mine]
    if len(parts) > 1 and all(entry.order and not entry.inside for entry in mine):
        *older, newest = sorted(mine, key=lambda entry: entry.order)
        notes.append(f"the newest was graded, {_names([newest])}; not graded: {_names(older)}")
        return HandedIn(student, (("", newest.path),), tuple(notes))
    candidates = [_joined(student, part, notes) for part in parts.values()]
    if len(candidates) > 1:
        if any(_read(other, lab) != _read(candidates[0], lab) for other in candidates[1:]):
            return Ungraded(student, "handed in more than once, and the files differ: keep one", submission=names)
        notes.append(f"handed in more than once, with the same files: {names}")
    return HandedIn(student, candidates[0].paths, tuple(notes))


def _joined(student: str, entries: Sequence[_Entry], notes: list[str]) -> HandedIn:
    """One submission of several files; of two that differ only in a resubmission's number, the newer one counts."""
    newest: dict[str, _Entry] = {}
    for entry in sorted(entries, key=lambda entry: entry.order):
        if entry.inside in newest:
            notes.append(f"{_names([newest[entry.inside]])} was not graded: {_names([entry])} is newer")
        newest[entry.inside] = entry
    if len(newest) == 1 and archive_stem(next(iter(newest))) is not None:
        return HandedIn(student, tuple(("", entry.path) for entry in newest.values()))
    return HandedIn(student, tuple((inside, entry.path) for inside, entry in newest.items()))


def _read(handed_in: HandedIn, lab: Lab) -> dict[str, bytes] | str:
    """What is in a submission of the lab's own modules, or why it cannot be read."""
    try:
        return {name: content for name, content in collect(handed_in, lab).files.items() if name.endswith(".py")}
    except UnreadableSubmission as error:
        return f"{handed_in.paths}: {error}"


def wrong_id(student: str) -> str:
    """Why a name cannot be an id, which is the name of files, folders and a line in nbgrader; empty if it can."""
    if not student.strip() or student != student.strip() or any(sign in student for sign in FORBIDDEN):
        return "a submission is named after its student, without / \\ + * ? [ ] { } and outer spaces: rename it"
    if student.startswith("."):
        return "a student's id cannot begin with a dot: rename it"
    if len(student.encode("utf-8", "replace")) > MAX_ID or not student.isprintable():
        return f"a student's id has at most {MAX_ID} bytes and can be printed: rename it"
    return ""


def _names(entries: Iterable[_Entry]) -> str:
    return ", ".join(shown(entry.path.name) for entry in entries)
