"""Modules of a submission that cannot be imported: which one it is, and what its student is told.

All exercises of a lab come out of one package, so a module that raises, hangs or ends Python on import would cost every
exercise. The one at fault is found in a sandbox and replaced by the one that was handed out; the rest is then graded.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grading.import_probe import FOUND, STANDING
from grading.lab import ROOT, Lab
from grading.results import Outcome
from grading.sandbox import Sandbox

SHOWN = {name: ROOT / name for name in ("grading/__init__.py", "grading/import_probe.py")}
LONGEST = 400  # characters of a student's own error
BEFORE = 5.0  # seconds that the probe ends before its sandbox does
LARGEST = 2**16


@dataclass(frozen=True)
class Broken:
    """A module that cannot be imported; ``why`` is a sentence for the student."""

    module: str
    outcome: Outcome
    why: str


def find_broken(
    lab: Lab, package: Path, sandbox: Callable[[Mapping[str, Path]], Sandbox], seconds: float
) -> Broken | None:
    """The module of a laid out submission that stops its import; None when the import works, or nobody can tell.

    Args:
        lab: the lab.
        package: the folder of the package that is imported.
        sandbox: makes a sandbox for the submission that shows these files of the course.
        seconds: what the import may take.
    """
    with sandbox(SHOWN) as place:
        out = place.folder / "import"
        out.mkdir()
        program = [sys.executable, "-P", "-m", "grading.import_probe", lab.name, "--package-root", str(place.work)]
        place.run([*program, "--out", str(out), "--limit", str(max(seconds - BEFORE, 1.0))])
        found, standing, killed = _read(out / FOUND), _text(out / STANDING), place.killed
    stack = [name for name in found.get("stack", ()) if isinstance(name, str)]
    error = found.get("error")
    suspects = [*reversed(stack)]
    if isinstance(found.get("home"), str) and suspects and not _is_students(lab, package, suspects[0]):
        suspects.insert(0, found["home"])  # what the course's own module could not find in it
    module = next((name for name in suspects if _is_students(lab, package, name)), None)
    if module is None:
        return None
    if isinstance(error, str):
        line = found.get("line") if module == stack[-1] else 0
        return Broken(module, "failed", _sentence(module, line, f"{_plain(error)}"))
    place_of = re.search(rf'/{re.escape(module)}", line (\d+) in <module>', standing)
    line = int(place_of[1]) if place_of else 0
    if killed or "Timeout (" in standing:
        return Broken(module, "timed out", _sentence(module, line, killed or "it never finishes importing"))
    return Broken(module, "crashed", _sentence(module, line, "it ends Python itself"))


def _sentence(module: str, line: object, why: str) -> str:
    at = f" (line {line})" if isinstance(line, int) and line > 0 else ""
    return f"{module} cannot be imported{at}: {why}"


def _is_students(lab: Lab, package: Path, name: str) -> bool:
    """Whether a module of the package is not as it was handed out."""
    path, released = package / name, lab.released / name
    if Path(name).name != name or not path.is_file():
        return False
    return not released.is_file() or path.read_bytes() != released.read_bytes()


def _plain(error: str) -> str:
    """A student's error on one line, without the sandbox's paths."""
    text = re.sub(r"\s*\((/[^()]*|[\w.]+\.py, line \d+)\)$", "", " ".join(error.split()))
    return text if len(text) <= LONGEST else text[:LONGEST] + " [cut]"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    """The beginning of a plain file that a sandbox wrote; empty if there is none."""
    if not path.is_file() or path.is_symlink():
        return ""
    with path.open("rb") as file:
        return file.read(LARGEST).decode("utf-8", "replace")
