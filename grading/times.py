"""When a submission was handed in, from whoever knows: the platform's export, or a table of the instructor's.

The time of a file or of a member of an archive is never taken: whoever packs an archive chooses it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

MOODLE_TIME = "%A, %d %B %Y, %I:%M %p"  # of a grading worksheet in English
MOST = 2**20  # bytes of a text that are read
COMMITTER = re.compile(rb"^committer .*> (\d{1,11}) [+-]\d{4}$", re.MULTILINE)


@dataclass(frozen=True)
class Submitted:
    """When something was handed in.

    Attributes:
        when: the time, in the class's time zone if it has no offset; None where nobody says.
        source: who says so.
        late: what is said without a time: whether it was late; None where nothing is said.
    """

    when: datetime | None = None
    source: str = ""
    late: bool | None = None


UNKNOWN = Submitted()


def parse_time(text: str) -> datetime:
    """A time as people, nbgrader, Gradescope and Moodle (in English) write it.

    Raises:
        ValueError: it is none.
    """
    text = " ".join(text.split())
    iso = re.sub(r" ?(Z|UTC|GMT)$", "+00:00", text)
    iso = re.sub(r" (?=[+-]\d\d:?\d\d$)", "", iso)
    if ":" in iso:  # a date alone is no time
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(iso)
    with contextlib.suppress(ValueError):
        return datetime.strptime(text, MOODLE_TIME)
    raise ValueError(f"{text!r} is no time such as 2026-11-21 12:30 or 2026-11-21T12:30+01:00")


def said(text: str, source: str) -> Submitted:
    """A time that a platform wrote down, which counts if it says where on Earth it is."""
    with contextlib.suppress(ValueError):
        if (when := parse_time(text)).tzinfo is not None:
            return Submitted(when, source)
    return UNKNOWN


def latest(times: Iterable[Submitted]) -> Submitted:
    """The time of a submission of several files: the last one that is known."""
    times = list(times)
    known = [one for one in times if one.when is not None]
    if known:
        return max(known, key=lambda one: one.when)
    return next((one for one in times if one.late), times[0] if times else UNKNOWN)


def gradescope_times(metadata: str) -> dict[str, Submitted]:
    """``created_at`` of each folder of a Gradescope export, from the text of ``submission_metadata.yml``."""
    times: dict[str, Submitted] = {}
    folder = key = ""
    for line in metadata.splitlines():
        if found := re.fullmatch(r"(\w+):\s*", line):
            folder = found[1]
        elif found := re.match(r" {2}:(\w+):", line):
            key = found[1]
        # a time, or what Ruby writes for one: its class, and `utc` in a line below
        if key == "created_at" and (found := re.fullmatch(r"(?: {2}:created_at| {4}utc): *(?:&\d+ )?(\d.*)", line)):
            times[folder] = said(found[1], "Gradescope")
    return times


def folder_time(folder: Path, lab_name: str) -> Submitted:
    """The time that a student's folder holds: what ``nbgrader collect`` writes, or the last commit of a clone."""
    if text := _text(folder / lab_name / "timestamp.txt"):
        return said(text, "nbgrader")
    when = commit_time(folder / ".git")
    return Submitted(when, "the date of the last commit") if when else UNKNOWN


def commit_time(git: Path) -> datetime | None:
    """The date of the commit that is checked out in a clone, or None where none can be read.

    A student's ``.git/config`` could name programs to run. So git works in an empty repository of its own, and takes
    nothing but objects from the clone.
    """
    if git.is_symlink() or not git.is_dir() or (commit := _head(git)) is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="mlf-git-") as own:
            for name in ("objects", "refs"):
                Path(own, name).mkdir()
            Path(own, "HEAD").write_text("ref: refs/heads/none\n")
            environment = {"GIT_DIR": own, "GIT_OBJECT_DIRECTORY": str(git / "objects"), "GIT_CONFIG_NOSYSTEM": "1"}
            environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "PATH": os.environ.get("PATH", os.defpath)}
            command = ["git", "cat-file", "commit", commit]
            ran = subprocess.run(command, env=environment, capture_output=True, timeout=20, check=True)
        found = COMMITTER.search(ran.stdout)
        return datetime.fromtimestamp(int(found[1]), UTC) if found else None
    except (OSError, ValueError, OverflowError, subprocess.SubprocessError):
        return None


def _head(git: Path) -> str | None:
    """The name of the commit that is checked out."""
    head = _text(git / "HEAD").strip()
    if found := re.fullmatch(r"ref: (refs/[\w./-]+)", head):
        packed = re.search(rf"^([0-9a-f]{{40}}) {re.escape(found[1])}$", _text(git / "packed-refs"), re.MULTILINE)
        head = "" if ".." in found[1] else _text(git / found[1]).strip() or (packed[1] if packed else "")
    return head if re.fullmatch(r"[0-9a-f]{40}", head) else None


def _text(path: Path) -> str:
    """The beginning of a text file; empty where there is none."""
    try:
        if path.is_symlink() or not path.is_file():
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MOST)
    except OSError:
        return ""
