"""The result of one submission: the one thing that the gradebook, the table, the pages and the files are made of."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from grading.lab import Lab
from grading.look import looks
from utils.atomic_write import write_atomically

FORMAT = 1
Outcome = Literal["passed", "failed", "not attempted", "refused", "timed out", "crashed", "tampered"]


@dataclass(frozen=True)
class Verdict:
    """What became of one exercise; ``message`` is plain text for the student, ``private`` for the instructor only."""

    outcome: Outcome
    message: str = ""
    seconds: float = 0.0
    private: str = ""

    @property
    def passed(self) -> bool:
        """Whether the exercise's points are earned."""
        return self.outcome == "passed"


def result(
    lab: Lab,
    student: str,
    digest: str,
    verdicts: Mapping[str, Verdict],
    notes: Iterable[str] = (),
    seconds: float = 0.0,
    status: Literal["graded", "unreadable"] = "graded",
) -> dict[str, Any]:
    """The result as it is stored, as JSON.

    Args:
        lab: the lab that was graded.
        student: whose submission it is.
        digest: what it was made from: the submission, the lab, the grader and the seeds.
        verdicts: by exercise number, one for each exercise of the lab.
        notes: what the student should know about the submission as a whole.
        seconds: wall time.
        status: ``unreadable`` when there was nothing to grade.

    Raises:
        KeyError: an exercise without a verdict.
    """
    notes, exercises = list(notes), []
    for exercise in lab.exercises:
        verdict = verdicts[exercise.number]
        exercises.append(
            {
                "number": exercise.number,
                "title": exercise.title,
                "score": _number(exercise.points if verdict.passed else 0),
                "max_score": _number(exercise.points),
                "outcome": verdict.outcome,
                "message": verdict.message,
                "seconds": round(verdict.seconds, 2),
                **({"private": verdict.private} if verdict.private else {}),
            }
        )
    return {
        "format": FORMAT,
        "lab": lab.name,
        "title": lab.title,
        "student": student,
        "digest": digest,
        "graded": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
        "score": _number(sum(exercise["score"] for exercise in exercises)),
        "max_score": _number(lab.max_score),
        "status": status,
        "notes": notes,
        "look": looks(notes),
        "exercises": exercises,
    }


def corrected(result: Mapping[str, Any], scores: Mapping[str, float]) -> dict[str, Any]:
    """A result with the scores that a person gave, by exercise number; ``automatic`` is then the grader's own."""
    exercises = [
        {**one, "score": _number(scores[one["number"]]), "automatic": one["score"]}
        if scores.get(one["number"], one["score"]) != one["score"]
        else one
        for one in result["exercises"]
    ]
    return {**result, "exercises": exercises, "score": _number(sum(one["score"] for one in exercises))}


def without(result: Mapping[str, Any], numbers: Collection[str]) -> dict[str, Any]:
    """A result without the exercises of these numbers: they are in neither of its two sums of points."""
    exercises = [one for one in result["exercises"] if one["number"] not in numbers]
    score, most = (_number(sum(one[name] for one in exercises)) for name in ("score", "max_score"))
    return {**result, "exercises": exercises, "score": score, "max_score": most}


def read_result(path: Path) -> dict[str, Any] | None:
    """The stored result, or None when there is none that this version can use."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make ``path`` a folder of these files; a reader finds the old folder or the new one, never a part of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (path.parent / f".{path.name}.{ending}" for ending in ("new", "old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    for name, content in files.items():
        (fresh / name).write_bytes(content)
    if path.exists():
        os.rename(path, old)
    os.rename(fresh, path)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as JSON, atomically."""
    write_atomically(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def digest_of(*parts: Mapping[str, bytes] | str) -> str:
    """A digest over texts and files by name; any difference in any of them gives another."""
    total = hashlib.sha256()
    for part in parts:
        items = sorted(part.items()) if isinstance(part, Mapping) else [("", part.encode())]
        for name, content in [*items, ("end of part", b"")]:
            total.update(f"{len(name.encode())} {name} {len(content)} ".encode() + content)
    return total.hexdigest()


def files_below(*folders: Path, endings: tuple[str, ...] = (".py", ".ipynb", ".json")) -> dict[str, bytes]:
    """Content of the course's own files in ``folders``, by path: for :func:`digest_of`."""
    return {
        str(path): path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix in endings and path.is_file() and "__pycache__" not in path.parts
    }


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(value)
