"""The feedback pages of a class as archives: one with a page for each id, and one that Moodle or Canvas takes back.

Moodle finds a student by the number in a folder's name. Canvas finds a student and a file that was handed in by the two
numbers in a file's name, and shows what comes back under the name of that file. So the page is put into a file of the
same kind: an archive, or the comments of a module.

Sources: ``mod/assign/feedback/file/importziplib.php`` of Moodle (*Upload multiple feedback files in a zip*), and
``infer_comment_context_from_filename`` in ``app/models/abstract_assignment.rb`` of Canvas (*Upload Submissions*).
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grading.archives import ZIP, archive_stem, zipped
from grading.class_folder import CANVAS, MOODLE
from grading.feedback import page, worth
from grading.gradescope import results as gradescope_results
from grading.submission import HandedIn
from utils.atomic_write import write_atomically

IDS, FOR_MOODLE, FOR_CANVAS = "feedback.zip", "feedback-moodle.zip", "feedback-canvas.zip"
PAGE = "feedback.html"
#: How an archive is compressed, by the end of its name.
TAR_MODES = {".gz": "w:gz", ".tgz": "w:gz", ".bz2": "w:bz2", ".tbz": "w:bz2", ".tbz2": "w:bz2", ".xz": "w:xz"}
TAR_MODES |= {".txz": "w:xz", ".tar": "w"}


def write(folder: Path, results: Mapping[str, Mapping[str, Any]], handed_in: Mapping[str, HandedIn]) -> dict[str, str]:
    """Write the archives of a lab, and remove those of an earlier run that nobody is in any more.

    Args:
        folder: ``grades/LAB``.
        results: by student, as they are shown.
        handed_in: what they were made from, by student.

    Returns:
        Why a student from Canvas is not in Canvas's archive, by student.
    """
    entries: dict[str, dict[str, bytes]] = {IDS: {}, FOR_MOODLE: {}, FOR_CANVAS: {}}
    left = {}
    for student, result in results.items():
        content = page(result).encode()
        names = [path.name for _, path in handed_in[student].paths]
        entries[IDS][f"{student}.html"] = content
        if moodle := next(filter(None, map(MOODLE.fullmatch, names)), None):
            name = moodle["name"].replace("_", " ")  # what stands before the first _ is the name
            entries[FOR_MOODLE][f"{_plain(name)}_{moodle['number']}_assignsubmission_file_/{PAGE}"] = content
        elif any(map(CANVAS.fullmatch, names)):
            name = _taken_back(names)
            if name is None:
                left[student] = f"not in {FOR_CANVAS}: Canvas takes back archives and .py files only"
            else:
                entries[FOR_CANVAS][_plain(name)] = _of_kind(name, content, result)
    for name, files in entries.items():
        if files:
            write_atomically(folder / name, zipped(files))
        else:
            (folder / name).unlink(missing_ok=True)
    return left


def _taken_back(names: list[str]) -> str | None:
    """The file from Canvas in whose place a page can come back: an archive, or else a module."""
    attached = [name for name in names if (found := CANVAS.fullmatch(name)) and found["attachment"]]
    kinds = ([n for n in attached if archive_stem(n)], [n for n in attached if n.lower().endswith(".py")])
    return next((kind[0] for kind in kinds if kind), None)


def _of_kind(name: str, content: bytes, result: Mapping[str, Any]) -> bytes:
    """A file of the kind that ``name`` says, with the page in it."""
    if name.lower().endswith(ZIP):
        return zipped({PAGE: content})
    if archive_stem(name) is None:
        return _comments(result).encode()
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=TAR_MODES[Path(name.lower()).suffix]) as archive:
        member = tarfile.TarInfo(PAGE)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return made.getvalue()


def _comments(result: Mapping[str, Any]) -> str:
    """What the page says, as comments of a Python module."""
    made = gradescope_results(result)
    parts = [made["output"]]
    for test in made["tests"]:
        parts.append(f"{test['number']} {test['name']}: {worth(test)}: {test['output']}")
    return "".join(f"# {line}".rstrip() + "\n" for line in "\n\n".join(parts).split("\n"))


def _plain(name: str) -> str:
    """A name that an archive can hold: without what is no character."""
    return name.encode("utf-8", "replace").decode()
