"""What counts of a submission: the lab's modules, whatever else lies there or is wrong with it.

A student's work is ``labs/LAB``. A copy of the course's ``solutions/`` never counts, and everything that is not graded
is named in a note.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from grading.archives import Reader, UnreadableSubmission, shown
from grading.lab import EXERCISES, Lab
from grading.look import COPIED, IGNORED, NO_MODULE, SOLUTIONS, Note

MAX_MODULE = 2**20
MARKER = b"### BEGIN SOLUTION"
NAMED = 20  # files or folders that a note names
LAB_FOLDER = re.compile(r"lab(\d{1,3})(_\w+)?")
LONGEST = 100  # characters of the name of a module
#: What browsers, file managers, platforms and people add to the name of a file.
NEAR = re.compile(
    r"(?P<stem>\w+?)([ _-]*(\(\d+\)|cop(y|ie|ia)|kopie|final)|[ _-]+v?\d+)*\.py(\.txt)?", re.ASCII | re.IGNORECASE
)


@dataclass(frozen=True)
class HandedIn:
    """What one student handed in.

    Attributes:
        student: the id.
        paths: files and folders, each with its name in the submission; the name is empty for a whole submission.
        notes: what the instructor should know about it.
    """

    student: str
    paths: tuple[tuple[str, Path], ...]
    notes: tuple[str, ...] = ()


@dataclass
class Submission:
    """The files of one student, by their name in the lab's folder, and what was left out or wrong."""

    student: str
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def collect(handed_in: HandedIn, lab: Lab) -> Submission:
    """Read a submission: the lab's files, in ``labs/LAB``, at the top or in any folder or archive below.

    Raises:
        UnreadableSubmission: a broken or oversized archive, not one file of the lab, or two versions of them.
    """
    reader = Reader()
    try:
        for name, path in handed_in.paths:
            reader.add(path, name)
    except UnreadableSubmission:
        raise
    except Exception as error:
        raise UnreadableSubmission(f"the submission cannot be read: {type(error).__name__}: {error}") from error
    released = {file.name: file.read_bytes() for file in lab.released.iterdir() if file.is_file()}
    submission = Submission(handed_in.student, notes=[Note(note, IGNORED) for note in reader.notes])
    theirs = _without_solutions(reader.files, lab.name, submission.notes)
    base = _base(theirs, released, lab)
    if base is None:
        expected = f"hand in the folder labs/{lab.name} with your modules in it"
        text = f"no file of {lab.name} is in the submission; {expected}"
        raise UnreadableSubmission("; ".join([text, _holds(theirs, reader, lab), *submission.notes[:NAMED]]))
    _take(submission, theirs, base, released, lab)
    missing = sorted(name for name in released if name.endswith(".py") and name not in submission.files)
    if missing:
        submission.notes.append(f"missing, so taken as handed out: {', '.join(missing)}")
    if not any(name.endswith(".py") for name in submission.files):
        text = "no module was handed in, only the notebook: answers are written into the modules beside it"
        submission.notes.append(Note(text, NO_MODULE))
    empty = [name for name, content in submission.files.items() if released.get(name) and not content.strip()]
    if empty:
        submission.notes.append(f"nothing is written in {', '.join(sorted(empty))}: the file is empty")
    for name in [name for name in submission.files if name.endswith(".py")]:
        if len(submission.files[name]) > MAX_MODULE:
            del submission.files[name]
            text = f"{name} was ignored: a module may have at most {MAX_MODULE // 1024:,} KiB"
            submission.notes.append(Note(text, IGNORED))
        elif MARKER in submission.files[name]:
            text = f"{name} is a copy of the course's solution: its markers are still there"
            submission.notes.append(Note(text, COPIED))
    return submission


def _holds(files: Mapping[str, bytes | None], reader: Reader, lab: Lab) -> str:
    """What is in a submission that holds no file of the lab."""
    if files:
        return f"it holds {_listed(map(PurePosixPath, files), PurePosixPath('labs', lab.name))}"
    if reader.skipped:
        names = list(map(shown, reader.skipped))
        return f"it holds only what is hidden or made by programs: {', '.join(names[:NAMED])}"
    return "nothing else in it could be read" if reader.notes else "it is empty"


def _without_solutions(files: Mapping[str, bytes | None], lab_name: str, notes: list[str]) -> dict[str, bytes | None]:
    """The files that are not in the course's own ``solutions/LAB``, which is noted."""
    place = f"/solutions/{lab_name}/".lower()
    theirs = {name: content for name, content in files.items() if place not in f"/{name.lower()}"}
    if len(theirs) < len(files):
        text = f"solutions/{lab_name}/ was left out: it is the course's solution, and only labs/{lab_name} is graded"
        notes.append(Note(text, SOLUTIONS))
    return theirs


def _module_of(name: str, released: Iterable[str]) -> str | None:
    """The lab's file that a file was meant to be: ``waves.py`` for ``waves.py``, ``waves-1.py`` and ``Waves.py``."""
    if name in released:
        return name
    found = NEAR.fullmatch(name) if len(name) <= LONGEST else None
    meant = f"{found['stem'].lower()}.py" if found else None
    return meant if meant in released else None


def _base(files: Mapping[str, bytes | None], released: Mapping[str, bytes], lab: Lab) -> PurePosixPath | None:
    """The folder that counts: ``labs/LAB``, or else the one with most of the lab's files, but none of another lab.

    Raises:
        UnreadableSubmission: two folders are as good as each other, and hold different work.
    """
    counts: Counter[PurePosixPath] = Counter()
    for path in map(PurePosixPath, files):
        numbers = [int(found[1]) for part in path.parts[:-1] if (found := LAB_FOLDER.fullmatch(part))]
        elsewhere = numbers and lab.number not in numbers
        if path.name != "__init__.py" and not elsewhere and _module_of(path.name, released):
            counts[path.parent] += 1

    def rank(at: PurePosixPath) -> tuple[bool, bool, int, bool]:
        return at.name != EXERCISES, at.parts[-2:] == ("labs", lab.name), counts[at], at.name == lab.name

    def work(at: PurePosixPath) -> dict[str, bytes | None]:
        """What is not as it was handed out, by its name in the folder."""
        inside = {name: files.get((at / name).as_posix()) for name in released if name.endswith(".py")}
        return {name: content for name, content in inside.items() if content not in (None, released[name])}

    best = max(map(rank, counts), default=None)
    equals = sorted((at for at in counts if rank(at) == best), key=lambda at: (len(at.parts), str(at)))
    worked_in = [at for at in equals if work(at)] or equals[:1]
    if any(work(at) != work(worked_in[0]) for at in worked_in):
        places = " and in ".join(_folder(at) for at in worked_in[:NAMED])
        raise UnreadableSubmission(f"the submission holds different versions of the lab, in {places}; hand in one")
    return worked_in[0] if worked_in else None


def _folder(at: PurePosixPath) -> str:
    return "the top folder" if at == PurePosixPath() else f"{shown(str(at))}/"


def _take(
    submission: Submission,
    files: Mapping[str, bytes | None],
    base: PurePosixPath,
    released: Mapping[str, bytes],
    lab: Lab,
) -> None:
    """Take the files of the folder ``base`` that count, and note the others."""
    near: dict[str, list[str]] = {}
    others: list[PurePosixPath] = []
    below = {file.relative_to(lab.released).as_posix(): file for file in lab.released.rglob("*") if file.is_file()}
    for name, content in files.items():
        path = PurePosixPath(name)
        relative = path.relative_to(base).as_posix() if path.is_relative_to(base) else None
        meant = _module_of(path.name, released)
        if relative in released and content is not None:
            submission.files[relative] = content
        elif relative is None and _is_of_course(path, content, base, lab):
            continue
        elif relative is None and meant and path.name != "__init__.py":
            text = f"{shown(name)} was ignored: the files in {_folder(base)} were graded"
            submission.notes.append(Note(text, IGNORED))
        elif relative and meant and "/" not in relative and content is not None:
            near.setdefault(meant, []).append(relative)
        elif relative and content is not None and _is_module(relative):
            submission.files[relative] = content
            submission.notes.append(f"{relative} is not a file of the lab; your modules may import it")
        elif relative not in below or content != below[relative].read_bytes():
            others.append(path)
    for meant, names in near.items():
        found = {name: files[(base / name).as_posix()] for name in names}
        _take_near(submission, meant, found, released[meant])
    if others:
        matters = any(files.get(path.as_posix()) is not None for path in others)  # code that was read, not a picture
        text = f"not graded, since no module of the lab: {_listed(others, base)}"
        submission.notes.append(Note(text, IGNORED if matters else ""))


def _is_of_course(path: PurePosixPath, content: bytes | None, base: PurePosixPath, lab: Lab) -> bool:
    """Whether a file beside ``labs/`` is the course's own, where the course was handed in as a whole."""
    course = base.parent.parent
    if base.parts[-2:] != ("labs", lab.name) or not path.is_relative_to(course):
        return False
    own = lab.solution.parents[1] / path.relative_to(course)
    try:
        return own.is_file() and (content is None or own.read_bytes() == content)
    except (OSError, ValueError):  # a name that no file can have
        return False


def _is_module(name: str) -> bool:
    """Whether a file in the lab's folder can be imported by its name."""
    return name.endswith(".py") and len(name) <= LONGEST and name[:-3].isidentifier()


def _take_near(submission: Submission, meant: str, found: Mapping[str, bytes], stub: bytes) -> None:
    """Take ``waves-1.py`` for ``waves.py`` where that is missing or as handed out and nothing else could be meant."""
    names = ", ".join(sorted(map(shown, found)))
    own = submission.files.get(meant)
    state = "missing" if own is None else "as it was handed out"
    if own is not None and own != stub:
        submission.notes.append(Note(f"{names} was not graded: {meant} was", IGNORED))
    elif len(set(found.values())) == 1:
        submission.files[meant] = next(iter(found.values()))
        submission.notes.append(f"{names} was graded as {meant}, which is {state}: a module needs its own name")
        return
    else:
        text = f"not graded: {names}. {meant} is {state}, and it is not clear which one is meant"
        submission.notes.append(Note(text, IGNORED))
    for name, content in found.items():
        if _is_module(name):
            submission.files[name] = content  # another module may import it


def _listed(paths: Iterable[PurePosixPath], base: PurePosixPath) -> str:
    """Files and, where they are not beside the graded ones, folders with the number of their files."""
    counts: Counter[str] = Counter()
    for path in paths:
        depth = next((i for i, (a, b) in enumerate(zip(path.parts, base.parts)) if a != b), len(base.parts))
        inside = len(path.parts) > depth + 1
        counts["/".join(path.parts[: depth + 1]) + "/" * inside] += 1
    listed = [f"{shown(n)} ({c} file{'s' * (c > 1)})" if n.endswith("/") else shown(n) for n, c in counts.items()]
    return ", ".join(listed[:NAMED]) + (f" and {len(listed) - NAMED} more" if len(listed) > NAMED else "")
