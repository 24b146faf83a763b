"""What a student handed in: the lab's files out of a folder or a zip, whatever else lies there or is wrong with it.

Nothing is extracted and nothing is followed: files are read into memory, within limits, and everything that is left
out becomes a note for the student.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from grading.lab import EXERCISES, Lab

MAX_FILE, MAX_TOTAL, MAX_MEMBERS = 4 * 2**20, 32 * 2**20, 5000
MAX_MODULE = 2**20
SKIPPED = ("__pycache__", "__MACOSX")


class UnreadableSubmission(ValueError):
    """There is nothing in it that can be graded; the text is for the student."""


@dataclass
class Submission:
    """The files of one student, by their name in the lab's folder, and what was left out or wrong."""

    student: str
    files: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def student_of(path: Path) -> str:
    """The student's id: the name of the folder, or of the zip without its ending."""
    return path.stem if path.suffix.lower() == ".zip" and path.is_file() else path.name


def students(folder: Path) -> dict[str, Path]:
    """Every submission in ``folder``, by student.

    Raises:
        ValueError: ``folder`` is none, a student handed in twice (a folder and a zip), or an id that cannot be a name
            of a file.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder of submissions: {folder}")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or (path.is_file() and path.suffix.lower() != ".zip"):
            continue
        student = student_of(path)
        if student in found:
            raise ValueError(f"two submissions of {student}: {found[student].name} and {path.name}; keep one")
        if not student.strip() or student != student.strip() or any(sign in student for sign in "/\\\0\n+*?[]{}"):
            raise ValueError(
                f"a submission is named after its student, without / \\ + * ? [ ] {{ }}, got {path.name!r}"
            )
        found[student] = path
    return found


def collect(path: Path, lab: Lab) -> Submission:
    """Read the submission at ``path``: the lab's files, at the top or in any folder below.

    Raises:
        UnreadableSubmission: a broken or oversized zip, or not one file of the lab in it.
    """
    submission = Submission(student_of(path))
    try:
        entries = dict(_zip_entries(path, submission) if path.is_file() else _folder_entries(path, submission))
    except UnreadableSubmission:
        raise
    except Exception as error:  # a crafted zip raises what it likes
        raise UnreadableSubmission(f"the submission cannot be read: {type(error).__name__}: {error}") from error
    released = {file.name for file in lab.released.iterdir() if file.is_file()}
    base = _base(entries, released, lab.name)
    if base is None:
        raise UnreadableSubmission(
            f"no file of {lab.name} is in the submission; hand in the folder labs/{lab.name} with your modules in it"
        )
    for name, content in entries.items():
        relative = (
            PurePosixPath(name).relative_to(base).as_posix() if PurePosixPath(name).is_relative_to(base) else None
        )
        if relative in released:
            submission.files[relative] = content
        elif relative and relative.endswith(".py") and "/" not in relative and relative[:-3].isidentifier():
            submission.files[relative] = content
            submission.notes.append(f"{relative} is not a file of the lab; your modules may import it")
        elif relative is None and PurePosixPath(name).name in released:
            submission.notes.append(f"{_shown(name)} was ignored: the files in {_shown(str(base))}/ were graded")
    missing = sorted(name for name in released if name.endswith(".py") and name not in submission.files)
    if missing:
        submission.notes.append(f"missing, so taken as handed out: {', '.join(missing)}")
    for name in [name for name in submission.files if name.endswith(".py")]:
        if len(submission.files[name]) > MAX_MODULE:
            del submission.files[name]
            submission.notes.append(f"{name} was ignored: a module may have at most {MAX_MODULE // 1024:,} KiB")
    return submission


def _base(entries: dict[str, bytes], released: set[str], lab_name: str) -> PurePosixPath | None:
    """The folder that holds most of the lab's files; one named as the lab is preferred, then the shallowest."""
    counts: dict[PurePosixPath, int] = {}
    for name in entries:
        path = PurePosixPath(name)
        if path.name in released and path.name != "__init__.py":
            counts[path.parent] = counts.get(path.parent, 0) + 1
    return max(
        counts,
        key=lambda at: (at.name != EXERCISES, counts[at], at.name == lab_name, -len(at.parts), str(at)),
        default=None,
    )


def _folder_entries(folder: Path, submission: Submission) -> Iterator[tuple[str, bytes]]:
    if folder.is_symlink():
        raise UnreadableSubmission("the submission is a link, not a folder")
    total = members = 0
    for place, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not _skip(name))
        for name in sorted(names):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            members += 1
            if members > MAX_MEMBERS:
                raise UnreadableSubmission(f"the submission holds more than {MAX_MEMBERS:,} files")
            if _skip(name):
                continue
            # opened without following a link, and asked afterwards what it is
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                submission.notes.append(f"{_shown(relative)} was ignored: it is a link, or cannot be read")
                continue
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    submission.notes.append(f"{_shown(relative)} was ignored: it is not a plain file")
                    continue
                if status.st_size > MAX_FILE:
                    submission.notes.append(_too_large(relative))
                    continue
                content = file.read(MAX_FILE + 1)
            total += len(content)
            if total > MAX_TOTAL:
                raise UnreadableSubmission(f"the submission holds more than {MAX_TOTAL // 2**20} MiB")
            yield relative, content


def _zip_entries(path: Path, submission: Submission) -> Iterator[tuple[str, bytes]]:
    if path.is_symlink():
        raise UnreadableSubmission("the submission is a link, not a file")
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnreadableSubmission("the submission is neither a folder nor a zip file")
    total = 0
    seen: set[str] = set()
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > MAX_MEMBERS:
            raise UnreadableSubmission(f"the zip holds more than {MAX_MEMBERS:,} files")
        for member in members:
            name = member.filename.replace("\\", "/")
            parts = PurePosixPath(name).parts
            if member.is_dir() or any(_skip(part) for part in parts if part != ".."):
                continue
            if name.startswith("/") or ".." in parts or not parts or ":" in parts[0] or "\0" in name:
                submission.notes.append(f"{_shown(name)} was ignored: it points out of the submission")
                continue
            if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
                submission.notes.append(f"{_shown(name)} was ignored: it is a link, or not a plain file")
                continue
            if member.flag_bits & 1:
                raise UnreadableSubmission("the zip is encrypted")
            if name in seen:
                submission.notes.append(f"{_shown(name)} is in the zip more than once; the first was taken")
                continue
            seen.add(name)
            with archive.open(member) as file:
                content = file.read(MAX_FILE + 1)  # whatever size the zip claims
            if len(content) > MAX_FILE:
                submission.notes.append(_too_large(name))
                continue
            total += len(content)
            if total > MAX_TOTAL:
                raise UnreadableSubmission(f"the zip unpacks to more than {MAX_TOTAL // 2**20} MiB")
            yield PurePosixPath(*parts).as_posix(), content


def _skip(name: str) -> bool:
    return name in SKIPPED or name.startswith(".")


def _too_large(name: str) -> str:
    return f"{_shown(name)} was ignored: it is larger than {MAX_FILE // 2**20} MiB"


def _shown(name: str) -> str:
    return name.encode("ascii", "replace").decode()[:120].replace("\n", " ")
